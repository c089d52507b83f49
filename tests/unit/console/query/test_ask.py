"""Questions to a store that others write and sort meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support.records.made_runs import made_run
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus
from tocsin.console.context import read_viewing_context
from tocsin.console.query.ask import Question, ask
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.topics import Topics
from tocsin.store import open_store
from tocsin.store.archive.merge import compact
from tocsin.store.archive.once import archive_run
from tocsin.store.query import live_files
from tocsin.store.query.engine import WrongQuery
from tocsin.store.query.stored_facts import fold_stored
from tocsin.store.storage.local import LocalStorage

MADE = made_run()
ALL = "SELECT count(*), count(DISTINCT step) FROM steps WHERE name = 'loss' AND mode = 'train'"


async def archive(bus: EmbeddedBus, folder: Path) -> None:
    await archive_run(bus, open_store(folder), "run-1", topics=Topics(), now_ms=lambda: 1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A bus with a run of two ranks, whose first part is in the store, in two files of a kind."""

    async def fill() -> None:
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            await MADE.publish(bus, stop=20)
            await archive(bus, tmp_path / "store")
            await MADE.publish(bus, start=20, stop=40)
            await archive(bus, tmp_path / "store")
            await MADE.publish(bus, start=40)

    asyncio.run(fill())
    return tmp_path


def answer(
    place: Path, sql: str = ALL, runs: Sequence[str] = (), bus: str = "bus.db"
) -> Sequence[Sequence[object]]:
    context = read_viewing_context(None, f"embedded:{place / bus}", store=str(place / "store"))
    return list(ask(context, Question(sql, tuple(runs), "60s", 512), progress=False).rows)


def test_a_run_that_only_the_store_has_is_not_one_of_the_bus_whose_name_goes_on(
    place: Path,
) -> None:
    async def fill() -> None:
        for name in ("run-1-again", "run-1-once-more"):
            async with EmbeddedBus(place / "other.db") as bus:
                await made_run(name).publish(bus)

    asyncio.run(fill())
    sql = "SELECT DISTINCT run_id FROM steps"
    assert answer(place, sql, ["run-1"], "other.db") == [["run-1"]]


def test_issues_that_have_expired_on_the_bus_come_from_the_store(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "SELECT run_id, issue_id FROM issues"

    async def finish() -> None:
        async with EmbeddedBus(place / "bus.db") as bus:
            await archive(bus, place / "store")

    asyncio.run(finish())
    before = answer(place, sql)
    assert before == [["run-1", MADE.issue.issue_id]]

    async def without_issues(bus: Bus, topics: Topics) -> RunsView:
        view = await read_view(bus, topics)
        view._issues.clear()
        return view

    monkeypatch.setattr("tocsin.console.query.ask.read_view", without_issues)
    assert answer(place, sql) == before


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles"])
def test_now_is_compared_in_utc(place: Path, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        ((apart,),) = answer(place, "SELECT epoch(now()::TIMESTAMP) - epoch(now()) AS apart")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert apart == pytest.approx(0, abs=0.001)


def test_a_pivot_says_what_it_needs(place: Path) -> None:
    with pytest.raises(WrongQuery, match="write the values out"):
        answer(place, "PIVOT runs ON state USING count(*)")
    assert answer(place, "PIVOT runs ON state IN ('running') USING count(*)")


def sorting(place: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The files of the run are merged after the first of them was found."""
    found: Callable[[LocalStorage, str], Path] = LocalStorage.local
    done: list[str] = []

    def local(storage: LocalStorage, path: str) -> Path:
        here = found(storage, path)
        if not done and storage.folder == place / "store":
            done.append(path)
            compact(open_store(place / "store"), "run-1", "telemetry", topics=Topics())
        return here

    monkeypatch.setattr(LocalStorage, "local", local)
    return done


def test_what_is_archived_while_it_is_asked_is_counted_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = live_files.live_files
    before = answer(place)

    async def then_archived(bus: EmbeddedBus, *given: object, **named: object) -> object:
        live = await read(bus, *given, **named)  # type: ignore[arg-type]
        await archive(bus, place / "store")
        return live

    monkeypatch.setattr(live_files, "live_files", then_archived)

    assert answer(place) == before == [[40, 20]]


def test_files_that_are_merged_while_it_is_asked_are_found(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = sorting(place, monkeypatch)

    assert answer(place) == [[40, 20]]
    assert done


def test_events_are_found_after_their_files_were_merged(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end() -> None:
        async with EmbeddedBus(place / "bus.db") as bus:
            await archive(bus, place / "store")

    asyncio.run(end())
    done, view = sorting(place, monkeypatch), RunsView()

    fold_stored(open_store(place / "store"), view, Topics(), ["run-1"])

    assert [run.run_id for run in view.runs] == ["run-1"]
    assert done
