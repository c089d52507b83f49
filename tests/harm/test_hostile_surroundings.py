"""What the machine and the user's own code may do to a watched training; it ends as without us."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.trainings.captured import captured, said
from support.trainings.small import TRAININGS, Result, plain
from tocsin.bus.embedded import tables
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.spool import SpoolWriter
from tocsin.bus.port import Outgoing
from tocsin.emitter.capture.capture import Capture
from tocsin.emitter.hooks.training_hooks import Hooks
from tocsin.schemas.records.runs import RunEnded
from tocsin.schemas.topics import Topics

EVERYTHING = (
    '{"collections": {"gradients": {"every": 1}, "weights": {"every": 2}, '
    '"activations": {"every": 2}}}'
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Result]:
    return {name: train(tmp_path_factory.mktemp(name)) for name, train in TRAININGS.items()}


@pytest.fixture(autouse=True, scope="module")
def importing() -> Iterator[None]:
    """Two would wait for each other where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5.0
    while left := [each.name for each in threading.enumerate() if each not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_losses_weights_random_numbers_and_the_order_of_samples_are_the_same(
    tmp_path: Path, expected: Mapping[str, Result], name: str
) -> None:
    with no_thread_left(), captured(tmp_path, TOCSIN_CAPTURE=EVERYTHING):
        assert TRAININGS[name](tmp_path).same_as(expected[name])
    assert said(tmp_path).steps()


def test_a_clock_that_jumps_does_no_harm(
    tmp_path: Path, expected: Mapping[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, began = random.Random(1), time.time_ns()

    def jumping() -> int:
        jump: int = chance.choice((-1, 0, 1)) * 10 ** chance.randint(9, 18)
        return max(0, began + jump)

    monkeypatch.setattr(time, "time_ns", jumping)
    monkeypatch.setattr(time, "time", lambda: jumping() / 1e9)
    with captured(tmp_path, TOCSIN_CAPTURE=EVERYTHING) as hooks:
        assert plain(tmp_path).same_as(expected["plain"])
        assert not hooks.isolation.off
    assert sorted(said(tmp_path).steps()) == list(range(8))
    assert said(tmp_path).of(RunEnded)


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_without_a_free_file_descriptor_a_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: Mapping[str, Result]
) -> None:
    used = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    limit = max(used) + 1
    for each in used[1:]:
        os.close(each)
    # Two are left: the training's own checkpoint needs one.
    with captured(tmp_path, TOCSIN_CAPTURE=EVERYTHING), limited(resource.RLIMIT_NOFILE, limit):
        result = plain(tmp_path)
    os.close(used[0])
    assert result.same_as(expected["plain"])
    assert "Too many open files" in capsys.readouterr().err


def test_a_model_that_is_gone_is_not_kept_alive(tmp_path: Path) -> None:
    def train() -> tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.optim.Optimizer]]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        return weakref.ref(model), weakref.ref(optimizer)

    with captured(tmp_path, TOCSIN_CAPTURE=EVERYTHING) as hooks:
        first = train()
        gc.collect()
        assert first[0]() is None
        assert first[1]() is None
        for _ in range(8):
            train()
        assert not hooks.isolation.off
    assert len(said(tmp_path).steps()) > 10


def test_an_interrupt_in_the_middle_of_a_hook_passes_and_the_next_step_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caught = 0

    def interrupted(original: Callable[..., object], at: int) -> Callable[..., object]:
        calls = []

        def call(*args: object, **kwargs: object) -> object:
            calls.append(1)
            if len(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return original(*args, **kwargs)

        return call

    with captured(tmp_path) as hooks:
        for at, name in enumerate(("on_backward", "before_step", "after_step"), 3):
            monkeypatch.setattr(Hooks, name, interrupted(getattr(Hooks, name), at))
        for _ in range(10):
            try:
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            except KeyboardInterrupt:
                caught += 1
        assert not hooks.isolation.off
    assert caught == 3
    found = said(tmp_path)
    assert len(found.steps()) >= 6
    assert found.of(RunEnded)


def test_a_step_that_raises_is_not_the_last_that_is_watched(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure(fails: bool) -> torch.Tensor:
        optimizer.zero_grad()
        if fails:
            raise ValueError("the user's own")
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    with captured(tmp_path) as hooks:
        for step in range(8):
            try:
                optimizer.step(lambda fails=step in (2, 4): closure(fails))
            except ValueError:
                continue
        assert not hooks.isolation.off
    assert sorted(said(tmp_path).steps()) == list(range(6))


def test_a_fork_in_the_middle_of_a_step_leaves_the_parent_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Mapping[str, Result]
) -> None:
    children: list[int] = []
    original = Capture.stepped

    def forking(self: Capture, *args: Any, **more: Any) -> int | None:
        step = original(self, *args, **more)
        if step == 3:
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                # As a child may that was forked for something else: it computes, then it exits.
                os._exit(int(not torch.isfinite(torch.ones(3).sum()).item()))
            children.append(child)
        return step

    monkeypatch.setattr(Capture, "stepped", forking)
    with no_thread_left(), captured(tmp_path, TOCSIN_CAPTURE=EVERYTHING):
        assert plain(tmp_path).same_as(expected["plain"])
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(8))
    assert len(found.of(RunEnded)) == 1


async def test_a_child_of_a_fork_in_the_middle_of_a_transaction_can_use_the_same_bus(
    tmp_path: Path,
) -> None:
    entered = threading.Event()

    def linger(db: sqlite3.Connection) -> None:
        with tables.transaction(db, write=True):
            entered.set()
            time.sleep(0.05)

    async def write() -> None:
        async with EmbeddedBus(tmp_path / "bus.db", busy_s=1.0) as own:
            await own.init(Topics().specs())

    def in_child() -> None:
        signal.alarm(20)
        try:
            asyncio.run(write())
        except BaseException:
            os._exit(1)
        os._exit(0)

    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        control, _, _ = bus._open()
        job = asyncio.create_task(control.run(linger))
        await asyncio.to_thread(entered.wait, 10.0)
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=in_child)  # this one has an event loop running
            thread.start()
            thread.join()
        await job
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_threads_that_are_refused_in_the_middle_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Mapping[str, Result]
) -> None:
    started, chance = threading.Thread.start, random.Random(5)

    def refuse(self: threading.Thread) -> None:
        if chance.random() < 0.6:
            raise RuntimeError("can't start new thread")
        started(self)

    for i in range(6):
        folder = tmp_path / str(i)
        folder.mkdir()
        with monkeypatch.context() as patch, no_thread_left():
            patch.setattr(threading.Thread, "start", refuse)
            with captured(folder):
                assert plain(folder).same_as(expected["plain"])


def test_a_bus_that_takes_nothing_for_a_while_costs_the_training_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(self: SpoolWriter, records: Sequence[Outgoing], /) -> None:
        await hung.wait()

    hung = asyncio.Event()
    monkeypatch.setattr(SpoolWriter, "publish", hang)
    began = time.monotonic()
    with captured(tmp_path) as hooks:
        plain(tmp_path)
        trained = time.monotonic() - began
        assert hooks.capture is not None
        assert not hooks.capture.training.sender.flush(0.2)
        hooks.capture.training.end("completed", timeout_s=0.2)
    assert trained < 5.0
    assert time.monotonic() - began - trained < 4.0


def flat(folder: Path, warm: int, steps: int) -> tuple[int, int]:
    """Growth of Python objects and of tensors over so many steps, after a warm-up."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, 32)

    def count() -> tuple[int, int]:
        gc.collect()
        found = gc.get_objects()
        return len(found), sum(1 for each in found if type(each) is torch.Tensor)

    def go(n: int) -> None:
        for _ in range(n):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    with captured(folder, TOCSIN_CAPTURE=EVERYTHING) as hooks:
        go(warm)
        assert hooks.capture is not None
        sender = hooks.capture.training.sender
        assert sender.flush(20.0)
        objects, tensors = count()
        go(steps)
        assert sender.flush(20.0)
        more_objects, more_tensors = count()
        assert not hooks.isolation.off
    return more_objects - objects, more_tensors - tensors


def test_nothing_is_kept_of_a_step(tmp_path: Path) -> None:
    objects, tensors = flat(tmp_path, 60, 300)
    assert tensors < 30  # one in ten steps: on a busy machine a few more are on their way
    assert objects < 3_000  # ten a step; a step itself makes hundreds


@pytest.mark.torture
def test_nothing_is_kept_of_two_thousand_steps(tmp_path: Path) -> None:
    objects, tensors = flat(tmp_path, 300, 2_000)
    assert tensors < 30
    assert objects < 400
