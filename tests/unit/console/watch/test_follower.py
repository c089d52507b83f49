"""How `tocsin watch` follows a bus: one not made yet, one that goes away and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.records.issues import TOPICS, issue, issue_record, view, view_record
from support.records.steps import written_steps
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, UnusableBus
from tocsin.console.context import read_context
from tocsin.console.watch import follower as watch_follower
from tocsin.console.watch.follower import Follower
from tocsin.console.watch.state import WatchedRun


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_follower, "RETRY_S", 0.05)
    monkeypatch.setattr(watch_follower, "ROUND_S", 0.02)


def follower_of(path: Path, run_id: str | None = None) -> Follower:
    return Follower(read_context(None, f"embedded:{path}", environ={}), run_id)


@asynccontextmanager
async def following(follower: Follower) -> AsyncIterator[Follower]:
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def said(follower: Follower) -> str:
    return follower.situation(time.time_ns() // 1_000_000).trouble or ""


async def publish(bus: EmbeddedBus, *records: Outgoing) -> None:
    producer = await bus.producer()
    await producer.publish(records)
    await producer.close()


def steps(run: str, first: int, *losses: float) -> Outgoing:
    return written_steps(run, {first + i: loss for i, loss in enumerate(losses)})


def watched(follower: Follower, run_id: str) -> WatchedRun:
    found = follower.state.run(run_id)
    assert found is not None
    return found


async def test_it_waits_for_a_bus_then_follows_it_as_runs_come(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with following(follower_of(path)) as follower:
        await until(lambda: "waiting for the bus: there is no bus at" in said(follower))
        async with EmbeddedBus(path) as bus:
            await bus.init(TOPICS.specs())
            await until(lambda: not said(follower))
            await publish(bus, steps("r1", 0, 3.0, 2.0))
            await until(lambda: "r1" in follower.state.view.seen)
            await publish(bus, view_record(view("r2")), issue_record(issue("r2")))
            await until(lambda: follower.state.view.issues and "r2" in follower.state.view.seen)
            await publish(bus, steps("r2", 0, 1.0), steps("r1", 2, 1.5))
            await until(lambda: watched(follower, "r2").step == 0)
            await until(lambda: watched(follower, "r1").step == 2)


async def test_a_bus_that_is_deleted_is_said_and_a_new_one_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        await publish(bus, view_record(view("r1")), steps("r1", 0, 3.0, 2.0))
    async with following(follower_of(path)) as follower:
        await until(lambda: follower.state.view.seen and watched(follower, "r1").step == 1)
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        await until(lambda: "bus away for 0 s, trying again" in said(follower))
        assert watched(follower, "r1").step == 1, "what was known stays"
        async with EmbeddedBus(path) as bus:
            await bus.init(TOPICS.specs())
            await publish(bus, view_record(view("r1")), view_record(view("r2")))
            await until(lambda: not said(follower) and "r2" in follower.state.view.seen)
            assert watched(follower, "r1").step == 1, "losses of the same training stay"
            await publish(bus, steps("r1", 2, 1.0))
            await until(lambda: watched(follower, "r1").step == 2)


async def test_of_one_run_only_its_partitions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        for run in ("r1", "r2"):
            await publish(bus, view_record(view(run)), issue_record(issue(run)), steps(run, 5, 1.0))
        follower = follower_of(path, "r2")
        await follower.read_once()
        assert set(follower.state.view.seen) == {"r2"}
        assert watched(follower, "r2").step == 5
        assert len(follower.state.view.issues) == 1


async def test_what_waiting_cannot_mend_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a bus" * 1_000)
    with pytest.raises(UnusableBus, match="is damaged or is not an SQLite file"):
        await follower_of(path).follow()
    with pytest.raises(UnusableBus, match="there is no bus at"):
        await follower_of(tmp_path / "missing.db").read_once()


async def test_more_telemetry_than_it_can_read_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_follower, "ROUND_RECORDS", 1)
    monkeypatch.setattr(watch_follower, "MAX_ROUNDS", 3)
    monkeypatch.setattr(watch_follower, "GAP_S", 0.05)
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        await publish(bus, *(steps("r1", step, 1.0) for step in range(50)))
        async with following(follower_of(path)) as follower:
            await until(lambda: follower.state.view.seen and watched(follower, "r1").step == 2)
            for step in range(100, 10_000):
                await publish(bus, steps("r1", step, 1.0))
                if (watched(follower, "r1").step or 0) >= 100:
                    break
            assert len(watched(follower, "r1").series) <= 6
