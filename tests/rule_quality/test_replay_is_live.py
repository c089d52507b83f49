"""What rules said while a training was under way, a replay of its telemetry says again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from fixtures.runs.recorded import recorded
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Outgoing, Partition, Record
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition
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
    producer = await bus.producer()
    for at in range(0, len(records), PIECE):
        piece = records[at : at + PIECE]
        await producer.publish([Outgoing(r.partition, r.key, r.value, r.headers) for r in piece])
        await worker.caught_up(20)
    await producer.close()
    worker.stop()
    await task


async def read_all(bus: EmbeddedBus, partition: Partition) -> list[Record]:
    reader = await bus.reader({partition: EARLIEST})
    end = (await reader.ends([partition]))[partition]
    records: list[Record] = []
    while await reader.position(partition) < end:
        records += await reader.poll(timeout_s=1.0)
    await reader.close()
    return records


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        pytest.param("mlp", "learning_rate_jump", marks=pytest.mark.torture),
        ("gpt", "nan_in_a_gradient"),
    ],
)
async def test_bit_for_bit(bus: EmbeddedBus, program: str, fault: str) -> None:
    records = recorded(program, fault)
    await live(bus, records)
    said = []
    place = Partition(TOPICS.issues, issue_partition(records[0].key.decode()))
    for record in await read_all(bus, place):
        assert record.value is not None
        event = decode(read_meta(record.headers), record.value)
        assert isinstance(event, Event)
        said.append(event.data.model_dump_json())
    again = await read_all(bus, records[0].partition)
    assert len(again) == len(records)
    assert said == [issue.model_dump_json() for issue in issues_of(again)]
    assert said
