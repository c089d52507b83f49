from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from pydantic import BaseModel, ValidationError

from tocsin.emitter.process.isolation import REST, TRIALS, Isolation


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
    isolation, said = Isolation(), []
    isolation.report = lambda probe, reason: said.append(probe)
    assert isolation.run("probe", failing(error)) is None
    assert isolation.run("other", lambda: 3) == 3
    assert isolation.off["probe"].startswith(type(error).__name__)
    assert said in (["probe"], [])
    assert isolation.run("probe", lambda: 3) is None


def test_a_value_that_does_not_fit_its_schema_switches_off_too() -> None:
    isolation = Isolation()
    isolation.run("probe", invalid)
    assert isolation.off["probe"].startswith(ValidationError.__name__)


def test_at_the_end_of_the_stack_nothing_gets_through() -> None:
    entered, passed = [], []

    def probe() -> None:
        entered.append(True)
        probe()

    def down(isolation: Isolation, depth: int) -> None:
        if depth == 0:
            isolation.run("probe", probe)
            passed.append(True)
        else:
            down(isolation, depth - 1)

    limit = sys.getrecursionlimit()
    outcomes = set()
    for depth in range(limit - 300, limit):
        entered.clear()
        passed.clear()
        isolation = Isolation()
        isolation.report = failing_report
        with suppress(RecursionError):
            down(isolation, depth)
        # Without a frame left for the isolation itself, the error is that of the call to it.
        outcomes.add((bool(entered), bool(passed)))
    assert outcomes == {(True, True), (False, False)}


def failing_report(probe: str, reason: str) -> None:
    raise RuntimeError(probe)


def test_an_interrupt_passes_and_leaves_the_clock_running() -> None:
    isolation = Isolation()
    with pytest.raises(KeyboardInterrupt):
        isolation.run("probe", failing(KeyboardInterrupt()))
    assert not isolation.off
    before = isolation.seconds
    isolation.run("probe", lambda: sum(range(1000)))
    assert isolation.seconds > before


def test_time_in_a_nested_call_is_counted_once() -> None:
    isolation = Isolation()
    isolation.run("outer", isolation.run, "inner", lambda: sum(range(10_000)))
    assert set(isolation.spent) == {"outer", "inner"}
    # The outer one is measured in CPU time, the inner by the clock: on a busy machine it is more.
    assert isolation.seconds == isolation.spent["outer"] > 0


def test_what_could_not_be_reported_is_reported_later() -> None:
    isolation, said = Isolation(), []

    def report(probe: str, reason: str) -> None:
        if len(isolation.off) < 2:
            raise MemoryError
        said.append((probe, reason))

    isolation.report = report
    isolation.run("one", failing(OSError("planted")))
    assert said == []
    isolation.run("two", failing(OSError("planted")))
    assert [probe for probe, _ in said] == ["one", "two"]
    isolation.report_off()
    assert len(said) == 2


def passed(isolation: Isolation, steps: int) -> None:
    for _ in range(steps):
        isolation.stepped()


def test_a_probe_that_failed_is_tried_again_after_a_rest_and_then_is_back() -> None:
    isolation, said = Isolation(), []
    isolation.report = lambda probe, reason: said.append(probe)
    isolation.run("probe", failing(OSError("once")))
    passed(isolation, REST - 1)
    assert isolation.run("probe", lambda: 3) is None
    assert isolation.rests("probe")
    passed(isolation, 1)
    assert isolation.run("probe", lambda: 3) == 3
    assert (isolation.off, isolation.came_back, said) == ({}, {"probe": "OSError: once"}, ["probe"])


def test_a_probe_that_fails_at_each_trial_stays_off_and_is_told_once() -> None:
    isolation, said, tried = Isolation(), [], []

    def fail() -> None:
        tried.append(True)
        raise OSError("planted")

    isolation.report = lambda probe, reason: said.append(probe)
    for _ in range(10 * REST):
        isolation.run("probe", fail)
        isolation.stepped()
    assert (len(tried), said) == (1 + TRIALS, ["probe"])
    assert isolation.off == {"probe": "OSError: planted"}


def test_what_was_switched_off_on_purpose_is_not_tried_again() -> None:
    isolation = Isolation()
    isolation.run("probe", isolation.switch_off, "probe", "planted")
    passed(isolation, 2 * REST)
    assert isolation.run("probe", lambda: 3) is None
