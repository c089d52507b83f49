"""The archive as a process that is killed at each point between poll and commit, and of a merge."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from support.processes.forking import Forked
from support.records.made_runs import made_run
from support.records.stored_rows import Rows, expected_rows, stored_rows
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.testing import CRASH_AT
from tocsin.runtime.testing import CRASH_POINTS as WORKER_POINTS
from tocsin.schemas.topics import Topics
from tocsin.store import open_run, open_store
from tocsin.store.archive.flush import CRASH_POINTS as FLUSH_POINTS
from tocsin.store.archive.merge import CRASH_POINTS as MERGE_POINTS

TESTS = Path(__file__).parents[2]
MADE = made_run()

# At the second pass: something was written before. Those that leave the same as the one before them
# are for `make torture`.
POINTS = [
    pytest.param(
        f"{point}:2",
        marks=[pytest.mark.torture] if point in ("polled", *WORKER_POINTS[2:4]) else [],
    )
    for point in (*WORKER_POINTS, *FLUSH_POINTS, *MERGE_POINTS)
]


async def process(path: Path, store: Path, family: str, crash_at: str | None = None) -> int:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop(CRASH_AT, None)
    if crash_at is not None:
        environment[CRASH_AT] = crash_at
    words = (f"embedded:{path}", str(store), family)
    child = Forked([sys.executable, "-m", "support.processes.archive", *words], env=environment)
    return await asyncio.to_thread(child.wait, 60)


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bus with a run, the middle of whose records was sent twice."""
    path = tmp_path_factory.mktemp("bus") / "bus.db"

    async def fill() -> None:
        async with EmbeddedBus(path) as opened:
            await MADE.publish(opened, stop=40)
            await MADE.publish(opened, start=30)

    asyncio.run(fill())
    return path


@pytest.fixture
def copied(bus: Path, tmp_path: Path) -> Path:
    """Each test has offsets of its own."""
    path = tmp_path / "bus.db"
    for one in bus.parent.glob("bus.db*"):
        if one.is_file():
            (tmp_path / one.name).write_bytes(one.read_bytes())
    return path


def of_telemetry(rows: Rows) -> list[str]:
    """Without their offsets, which on the bus are others: some records are there twice."""
    return sorted(
        repr((*row[:3], row[4]) if row[0] == "events" else row)
        for row in rows.elements()
        if row[0] != "events" or row[2] == Topics().telemetry
    )


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_at_any_point_loses_and_doubles_nothing(copied: Path, point: str) -> None:
    store = copied.parent / "store"

    assert await process(copied, store, "telemetry", point) == -signal.SIGKILL
    assert await process(copied, store, "telemetry") == 0

    opened = open_store(store)
    found = of_telemetry(stored_rows(opened, "run-1"))
    assert found == of_telemetry(expected_rows(MADE.telemetry))
    manifest = opened.manifests("run-1")["telemetry"]
    assert manifest.compacted
    named = {file.path for file in manifest.files}
    left = {path.relative_to(store).as_posix() for path in store.glob("run=*/**/*.parquet")}
    assert left == named


async def test_issues_too(copied: Path) -> None:
    store = copied.parent / "store"
    assert await process(copied, store, "issues", "manifest_written:1") == -signal.SIGKILL
    assert await process(copied, store, "issues") == 0
    assert await process(copied, store, "telemetry") == 0

    run = await asyncio.to_thread(open_run, "run-1", store=store)

    assert [issue.issue_id for issue in run.issues()] == [MADE.issue.issue_id]
    assert [delivery.state for delivery in run.deliveries()] == ["delivered"]
    assert run.view is not None
    assert run.view.state == "ended"
