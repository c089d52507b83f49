"""What rules said while a training was under way, a replay of its telemetry says again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from fixtures.runs.recorded import recorded
from support.processes.archive import archive_all
from support.records.on_bus import data_of, read_all, send
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Record
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.store import open_store
from tocsin.store.stored import StoredFiles
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import issues_of

TOPICS = Topics()
PIECE = 25
"""Records that are sent before the worker is let through."""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


async def live(bus: EmbeddedBus, records: Sequence[Record]) -> None:
    """Send the records piece by piece to a worker that reads them meanwhile."""
    run_id = records[0].key.decode()
    worker = Worker(
        bus,
        build_rules_service(TOPICS),
        topics=TOPICS,
        group="tocsin-rules",
        only_runs={run_id},
        settings=WorkerSettings(checkpoint_s=0.02, poll_records=7),
    )
    task = asyncio.create_task(worker.run())
    for at in range(0, len(records), PIECE):
        await send(bus, records[at : at + PIECE])
        await worker.caught_up(20)
    worker.stop()
    await task


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        pytest.param("mlp", "learning_rate_jump", marks=pytest.mark.torture),
        ("cnn", "nan_in_a_gradient"),
    ],
)
async def test_bit_for_bit(bus: EmbeddedBus, tmp_path: Path, program: str, fault: str) -> None:
    records = recorded(program, fault)
    await live(bus, records)
    issues = await data_of(bus, TOPICS.issues, issue_partition(records[0].key.decode()))
    said = [issue.model_dump_json() for issue in issues]
    again = await read_all(bus, *records[0].partition)
    assert len(again) == len(records)
    assert said == [issue.model_dump_json() for issue in issues_of(again)]
    assert said

    store, run_id = open_store(tmp_path / "store"), records[0].key.decode()
    await archive_all(bus, store)
    stored = [
        Record(records[0].partition, one.offset, one.append_ms, one.key, one.value, one.headers)
        for one in StoredFiles(store, run_id).telemetry(TOPICS)
    ]
    assert said == [issue.model_dump_json() for issue in issues_of(stored)]
