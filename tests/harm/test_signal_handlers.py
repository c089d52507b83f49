"""What the user's signal handlers raise gets to the user, wherever in our code it strikes.

Time limits, watchdogs and schedulers that take a node back work so: a handler raises, the loop
catches it, writes a checkpoint and ends.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from support.trainings.captured import captured
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.stop import exit_points
from tocsin.emitter.stop.leave_report import ExitPoint
from tocsin.schemas.records.frames import RecordOrigin

_HERE = "/tocsin/emitter/"


class TimeIsUp(Exception):
    """Raised by the user's handlers."""


def end(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp


class Watchdog:
    """A handler that is an object."""

    def __call__(self, *received: object) -> None:
        self.bark()

    def bark(self) -> None:
        raise TimeIsUp

    def heard(self, number: int, frame: FrameType | None) -> None:
        self.bark()


def end_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise TimeIsUp


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def strike() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    "handler",
    [end, Watchdog(), Watchdog().heard, functools.partial(end), end_once],
    ids=["function", "object", "method", "partial", "puts the one before it back"],
)
def test_it_passes_the_wall_and_is_not_held_against_the_probe(
    handler: Callable[..., None],
) -> None:
    isolation = Isolation()
    with handled_by(handler), pytest.raises(TimeIsUp):
        isolation.run("probe", strike)
    assert not isolation.off
    assert isolation.run("probe", lambda: 3) == 3


def test_our_own_error_is_none_of_theirs_though_it_holds_frames() -> None:
    def fail(number: int, frame: FrameType | None) -> None:
        raise OSError("planted")

    isolation = Isolation()
    with handled_by(end):
        assert isolation.run("probe", fail, 3, None) is None
    assert list(isolation.off) == ["probe"]


def test_it_passes_an_exit_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    rank = exit_points.started(RecordOrigin(run_id="r1", incarnation="i1"), lambda data: None)

    def at_exit_point(exit_point: ExitPoint, step: int) -> None:
        strike()

    try:
        rank.awake = True
        monkeypatch.setattr(rank, "at_exit_point", at_exit_point)
        with handled_by(end), pytest.raises(TimeIsUp):
            exit_points.check("optimizer_step", 3)
        assert rank.awake
    finally:
        exit_points.finished()


class Striker:
    """The signal comes with the n-th call of a function of ours on this thread."""

    def __init__(self) -> None:
        self.struck: list[str] = []

    @contextmanager
    def at_call(self, number: int) -> Iterator[None]:
        count = 0

        def look(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            code = frame.f_code
            # Not generators: what strikes while one is closed is lost in any Python.
            if event == "call" and _HERE in code.co_filename and not code.co_flags & CO_GENERATOR:
                count += 1
                if count == number:
                    self.struck.append(code.co_qualname)
                    strike()

        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(None)


def test_none_is_lost_in_a_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    striker, caught = Striker(), []
    with captured(tmp_path) as hooks, handled_by(end):
        for step in range(150):
            # The first steps, in which much happens only once, are left in peace.
            number = 0 if step < 3 else 1 + step * 7 % 211
            try:
                with striker.at_call(number):
                    loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1))
                    optimizer.zero_grad()
                    loss.backward()
                    if step % 3 == 0:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            except TimeIsUp:
                caught.append(striker.struck[-1])
        assert not hooks.isolation.off
    assert caught == striker.struck
    assert len(set(caught)) > 20
