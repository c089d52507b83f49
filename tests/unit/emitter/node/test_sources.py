"""Sources that are expensive, fail, answer slowly or hang, and a clock that is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from support.waiting import SOON_S, wait_until
from tocsin.emitter.node import sources
from tocsin.emitter.node.sources import EMPTY_S, FAILURES, KEPT_S, Paced, Sample, ThreadedSource


@pytest.fixture
def told() -> list[str]:
    return []


def test_an_expensive_source_is_read_less_often_and_its_values_stand() -> None:
    taken: list[float] = []

    def read(now_s: float) -> Sample:
        taken.append(now_s)
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return {"a": now_s}

    source = Paced("it", read, share=0.001)
    assert [source.sample(now_s)["a"] for now_s in (0.0, 0.5, 1.0, 3.0)] == [0.0, 0.5, 0.5, 0.5]
    # The first reading may have been the only one that was.
    assert taken == [0.0, 0.5]
    assert source.sample(1000.0) == {"a": 1000.0}


def test_a_source_that_fails_is_said_once_and_left(told: list[str]) -> None:
    taken: list[float] = []

    def read(now_s: float) -> Sample:
        taken.append(now_s)
        raise OSError("gone")

    source = Paced("it", read, report=told.append)
    for n in range(FAILURES + 5):
        assert source.sample(float(100 * n)) == {}
    assert told == ["it: not sampled any more: gone"]
    assert len(taken) == FAILURES


class Slow:
    """A source that waits for the test, and says what it was asked."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.taken: list[float] = []

    def read(self, now_s: float) -> Sample:
        self.taken.append(now_s)
        self.go.wait(30)
        return {"a": now_s}


@pytest.fixture
def slow() -> Iterator[Slow]:
    source = Slow()
    yield source
    source.go.set()


def test_a_source_beside_is_as_fresh_as_it_can_be() -> None:
    source = ThreadedSource("it", lambda now_s: {"a": now_s})
    now_s = 0.0

    def is_fresh() -> bool:
        nonlocal now_s
        now_s += 1
        return source.sample(now_s) == {"a": now_s}

    wait_until(is_fresh)
    source.close()


def test_one_that_hangs_holds_up_nobody_and_has_importing(slow: Slow, told: list[str]) -> None:
    source = ThreadedSource("GPUs", slow.read, report=told.append)
    before = threading.active_count()
    assert source.sample(0.0) == {}
    began = time.monotonic()
    for n in range(1, 1000):
        assert source.sample(float(n)) == {}
    assert time.monotonic() - began < SOON_S
    assert threading.active_count() <= before + 1
    assert slow.taken == [0.0]
    assert told == [f"GPUs: no answer for {KEPT_S:g} s; left out until there is one"]
    slow.go.set()
    # It comes back: the answer that was late is too old, the next is not.
    wait_until(lambda: slow.taken == [0.0] and not source.sample(1000.0))
    now_s = 1000.0

    def is_back() -> bool:
        nonlocal now_s
        now_s += 1
        return source.sample(now_s) == {"a": now_s}

    wait_until(is_back)
    source.close()


def test_one_that_is_slow_is_asked_less_often(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SLOW_S", 0.02)
    taken: list[float] = []

    def read(now_s: float) -> Sample:
        taken.append(now_s)
        time.sleep(0.03)
        return {"a": now_s}

    source = ThreadedSource("GPUs", read, report=told.append)
    wait_until(lambda: source.sample(0.0))
    # The first reading may load a driver: nothing is said, and it is asked again at once.
    assert told == []
    for n in range(100):
        source.sample(n * 0.01)
        time.sleep(0.001)
    assert len(taken) <= 6
    assert [line.split(":")[0] for line in told] == ["GPUs"]
    assert source.sample(1.0)
    source.close()


def test_one_that_fails_beside_is_said_once(told: list[str]) -> None:
    def fail(now_s: float) -> Sample:
        raise OSError("gone")

    source = ThreadedSource("it", fail, report=told.append)
    now_s = 0.0

    def is_told() -> bool:
        nonlocal now_s
        now_s += 1
        return source.sample(now_s) == {} and bool(told)

    wait_until(is_told)
    assert told == ["it: not sampled any more: gone"]
    source.close()


def test_one_that_has_nothing_is_asked_rarely() -> None:
    taken: list[float] = []

    def read(now_s: float) -> Sample:
        taken.append(now_s)
        return {}

    source = ThreadedSource("GPUs", read)
    wait_until(lambda: source.sample(0.0) == {} and source._asked_s is None)
    for n in range(9):
        source.sample(n * EMPTY_S / 10)
    assert taken == [0.0]
    source.close()


def test_no_thread_is_no_harm(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source = ThreadedSource("it", lambda now_s: {"a": 1.0}, report=told.append)
    assert source.sample(0.0) == source.sample(1.0) == {}
    assert told == ["it: not sampled any more: can't start new thread"]
