from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from pydantic import BaseModel, ValidationError

from tocsin.emitter.process.isolation import REST, TRIALS, Wall


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


class Silent(Exception):
    """Cannot even say what is wrong."""

    def __str__(self) -> str:
        raise UnicodeError("planted")


class Strict(BaseModel):
    step: int


def invalid() -> None:
    Strict(step="no number")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("planted"),
        MemoryError(),
        OSError(24, "Too many open files"),
        RecursionError("planted"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "planted"),
        StopIteration(3),
        AssertionError(),
        Silent(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_of_ours_gets_through(error: Exception) -> None:
    wall, said = Wall(), []
    wall.report = lambda probe, reason: said.append(probe)
    assert wall.call("probe", failing(error)) is None
    assert wall.call("other", lambda: 3) == 3
    assert wall.off["probe"].startswith(type(error).__name__)
    assert said in (["probe"], [])
    assert wall.call("probe", lambda: 3) is None


def test_a_value_that_does_not_fit_its_schema_switches_off_too() -> None:
    wall = Wall()
    wall.call("probe", invalid)
    assert wall.off["probe"].startswith(ValidationError.__name__)


def test_at_the_end_of_the_stack_nothing_gets_through() -> None:
    entered, passed = [], []

    def probe() -> None:
        entered.append(True)
        probe()

    def down(wall: Wall, depth: int) -> None:
        if depth == 0:
            wall.call("probe", probe)
            passed.append(True)
        else:
            down(wall, depth - 1)

    limit = sys.getrecursionlimit()
    outcomes = set()
    for depth in range(limit - 300, limit):
        entered.clear()
        passed.clear()
        wall = Wall()
        wall.report = failing_report
        with suppress(RecursionError):
            down(wall, depth)
        # Without a frame left for the wall itself, the error is that of the call to it.
        outcomes.add((bool(entered), bool(passed)))
    assert outcomes == {(True, True), (False, False)}


def failing_report(probe: str, reason: str) -> None:
    raise RuntimeError(probe)


def test_an_interrupt_passes_and_leaves_the_clock_running() -> None:
    wall = Wall()
    with pytest.raises(KeyboardInterrupt):
        wall.call("probe", failing(KeyboardInterrupt()))
    assert not wall.off
    before = wall.seconds
    wall.call("probe", lambda: sum(range(1000)))
    assert wall.seconds > before


def test_time_in_a_nested_call_is_counted_once() -> None:
    wall = Wall()
    wall.call("outer", wall.call, "inner", lambda: sum(range(10_000)))
    assert set(wall.spent) == {"outer", "inner"}
    assert wall.seconds == wall.spent["outer"] > wall.spent["inner"]


def test_what_could_not_be_reported_is_reported_later() -> None:
    wall, said = Wall(), []

    def report(probe: str, reason: str) -> None:
        if len(wall.off) < 2:
            raise MemoryError
        said.append((probe, reason))

    wall.report = report
    wall.call("one", failing(OSError("planted")))
    assert said == []
    wall.call("two", failing(OSError("planted")))
    assert [probe for probe, _ in said] == ["one", "two"]
    wall.say_what_is_off()
    assert len(said) == 2


def passed(wall: Wall, steps: int) -> None:
    for _ in range(steps):
        wall.stepped()


def test_a_probe_that_failed_is_tried_again_after_a_rest_and_then_is_back() -> None:
    wall, said = Wall(), []
    wall.report = lambda probe, reason: said.append(probe)
    wall.call("probe", failing(OSError("once")))
    passed(wall, REST - 1)
    assert wall.call("probe", lambda: 3) is None
    assert wall.rests("probe")
    passed(wall, 1)
    assert wall.call("probe", lambda: 3) == 3
    assert (wall.off, wall.came_back, said) == ({}, {"probe": "OSError: once"}, ["probe"])


def test_a_probe_that_fails_at_each_trial_stays_off_and_is_told_once() -> None:
    wall, said, tried = Wall(), [], []

    def fail() -> None:
        tried.append(True)
        raise OSError("planted")

    wall.report = lambda probe, reason: said.append(probe)
    for _ in range(10 * REST):
        wall.call("probe", fail)
        wall.stepped()
    assert (len(tried), said) == (1 + TRIALS, ["probe"])
    assert wall.off == {"probe": "OSError: planted"}


def test_what_was_switched_off_on_purpose_is_not_tried_again() -> None:
    wall = Wall()
    wall.call("probe", wall.switch_off, "probe", "planted")
    passed(wall, 2 * REST)
    assert wall.call("probe", lambda: 3) is None
