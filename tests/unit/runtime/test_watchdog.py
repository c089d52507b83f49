"""A worker that hangs is ended; one whose consumer returns nothing, though there is more, ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

import pytest

from tocsin.bus.port import Partition
from tocsin.runtime import watchdog
from tocsin.runtime.watchdog import STUCK_MS, Progress, Watchdog

A, B = Partition("t", 0), Partition("t", 1)


def test_a_partition_that_has_more_and_does_not_move_is_found() -> None:
    progress = Progress()
    ends = {A: 10, B: 5}
    assert progress.observe({A: 3, B: 5}, ends, 0) is None
    assert progress.observe({A: 3, B: 5}, ends, STUCK_MS - 1) is None
    assert progress.observe({A: 4, B: 5}, ends, STUCK_MS) is None, "it moves"
    assert progress.observe({A: 4, B: 5}, ends, 2 * STUCK_MS - 1) is None
    assert progress.observe({A: 4, B: 5}, ends, 2 * STUCK_MS) == A


def test_one_without_lag_or_that_was_given_up_is_not_stuck() -> None:
    progress = Progress()
    progress.observe({A: 3}, {A: 10}, 0)
    assert progress.observe({A: 10}, {A: 10}, STUCK_MS) is None
    progress.observe({A: 3}, {A: 10}, 2 * STUCK_MS)
    assert progress.observe({}, {A: 10}, 3 * STUCK_MS) is None
    assert progress.observe({A: 3}, {A: 10}, 4 * STUCK_MS) is None, "it came back just now"


async def ended(
    alive: object, *, watched_for: float, last_words: Callable[[], object] | None = None
) -> list[int]:
    codes: list[int] = []
    gone = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        gone.set()

    dog = Watchdog(alive, hangs_s=0.08, last_words=last_words, end=end)  # type: ignore[arg-type]
    task = asyncio.create_task(dog.run())
    await asyncio.to_thread(gone.wait, watched_for)
    dog.stop()
    await task
    return codes


async def test_a_worker_whose_rounds_do_not_end_is_ended() -> None:
    assert await ended(lambda: 7, watched_for=30.0) == [1]


async def test_one_that_is_at_work_or_has_not_begun_is_left_alone() -> None:
    numbers = itertools.count()
    assert await ended(lambda: next(numbers), watched_for=0.4) == []
    assert await ended(lambda: None, watched_for=0.4) == []


async def test_its_last_words_come_before_the_end_and_do_not_put_it_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.1)
    began, never = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        never.wait()

    try:
        assert await ended(lambda: 7, watched_for=30.0, last_words=hang) == [1]
        assert began.is_set()
    finally:
        never.set()
    assert "MainThread:\n" in caplog.text, "where the threads are"
