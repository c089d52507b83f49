"""The archive over both buses: what was on the bus is in the store, once, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

from support.buses import World
from support.processes.archive import archive_all
from support.records.made_runs import made_run, of_team
from support.records.on_bus import Died, die
from support.records.stored_rows import Rows, expected_rows, stored_rows
from tocsin.runtime.testing import CrashPoints
from tocsin.schemas.topics import Topics
from tocsin.store import open_run, open_store


def of_telemetry(rows: Rows, topics: Topics) -> Counter[str]:
    """Of events, without topic and offset: on this bus they are others."""
    return Counter(
        repr((row[0], row[4]) if row[0] == "events" else row)
        for row in rows.elements()
        if row[0] != "events" or row[2] in (topics.telemetry, Topics().telemetry)
    )


async def test_all_of_a_run_is_in_the_store_once(world: World, tmp_path: Path) -> None:
    topics = Topics(world.prefix)
    made = of_team(made_run(), world.prefix)
    folder = tmp_path / "store"
    crash = CrashPoints("manifest_written:2", die=die)
    async with world.bus() as bus:
        await bus.init(topics.specs())
        await made.publish(bus, stop=50)
        with contextlib.suppress(Died, ExceptionGroup):
            await archive_all(bus, open_store(folder), topics=topics, crash=crash)
        assert crash.passed["manifest_written"] == 2
        await made.publish(bus, start=50)

        await archive_all(bus, open_store(folder), topics=topics)
        await archive_all(bus, open_store(folder), topics=topics, group="another")

        store = open_store(folder)
        assert of_telemetry(stored_rows(store, "run-1"), topics) == of_telemetry(
            expected_rows(made_run().telemetry), topics
        )
        live = await asyncio.to_thread(open_run, "run-1", bus=world.bus, topics=topics)
        run = await asyncio.to_thread(open_run, "run-1", store=store, topics=topics)
        assert run.series("loss", rank=1).values.tolist() == (
            live.series("loss", rank=1).values.tolist()
        )
        assert [one.issue_id for one in run.issues()] == [made.issue.issue_id]
        assert run.view == live.view
