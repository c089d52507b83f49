"""Records of runs that somebody else serves, kept until nobody does."""

from __future__ import annotations

import pytest

from tocsin.bus.port import Partition, Record
from tocsin.runtime import leased_runs
from tocsin.runtime.leased_runs import ASK_MS, SERVED_MS, HoldLimit, SkippedRuns

P0 = Partition("t", 0)


def at(offset: int, append_ms: int, run: bytes = b"r", size: int = 9) -> Record:
    return Record(P0, offset, append_ms, run, bytes(size), ())


async def test_the_last_records_are_held_and_given_back_when_the_other_is_gone() -> None:
    served = {"r", "s"}

    async def skip(run_id: str) -> bool:
        return run_id in served

    runs = SkippedRuns(skip, hold=True, limit=HoldLimit(age_ms=1_000, size_bytes=45))
    await runs.refresh([b"r", b"s"], 0)
    for record in (at(0, 0), at(1, 500), at(2, 1_200)):
        assert runs.skips(record)
    assert runs.before(P0, 3) == 1, "the first was too old"
    assert runs.skips(at(3, 1_300, b"s", 29))
    assert runs.before(P0, 4) == 2, "together they were too much"
    assert runs.released() == []

    served.clear()
    await runs.refresh([], ASK_MS)
    assert [record.offset for record in runs.released()] == [2, 3]
    assert runs.before(P0, 4) == 4
    assert not runs.skips(at(4, 1_400))


async def test_a_run_that_was_served_here_and_is_anothers_is_told_once() -> None:
    elsewhere: set[str] = set()

    async def skip(run: str) -> bool:
        return run in elsewhere

    runs = SkippedRuns(skip, hold=True)
    assert await runs.refresh([b"r"], 0) == frozenset()
    assert not runs.skips(at(0, 0))
    elsewhere.add("r")
    assert await runs.refresh([], ASK_MS) == frozenset(), "nobody asks while nothing happens"
    assert await runs.refresh([], ASK_MS, served=True) == {"r"}
    assert await runs.refresh([b"r"], 2 * ASK_MS) == frozenset()
    assert runs.skips(at(1, 1))
    elsewhere.clear()
    assert await runs.refresh([], 3 * ASK_MS) == frozenset()
    assert [record.offset for record in runs.released()] == [1]
    elsewhere.add("r")
    assert await runs.refresh([b"r"], 4 * ASK_MS) == {"r"}, "it was served here again"


async def test_more_runs_than_are_remembered_are_still_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def skip(run: str) -> bool:
        return True

    monkeypatch.setattr(leased_runs, "MOST_ANSWERS", 2)
    runs = SkippedRuns(skip, hold=False)
    await runs.refresh([b"r", b"s", b"t"], 0)
    assert all(runs.skips(at(offset, 0, run)) for offset, run in enumerate((b"r", b"s", b"t")))


async def test_a_run_that_is_silent_for_days_is_not_asked_about_any_more() -> None:
    asked: list[str] = []

    async def skip(run: str) -> bool:
        asked.append(run)
        return False

    runs = SkippedRuns(skip, hold=True)
    await runs.refresh([b"r"], 0)
    assert not runs.skips(at(0, 0))
    await runs.refresh([b"s"], SERVED_MS - 1)
    assert not runs.skips(at(1, 0, b"s"))
    asked.clear()
    await runs.refresh([], SERVED_MS + ASK_MS, served=True)
    assert asked == ["s"]
