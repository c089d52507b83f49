"""The worker on a real Kafka: members share, one takes over, one goes on after a restart."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from support.rules.fold_service import FoldService, expected_outputs
from support.waiting import until
from tocsin.bus.port import EARLIEST, Bus, Outgoing, Partition, Record
from tocsin.bus.urls import open_bus
from tocsin.runtime.service import Poison, Tick
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import TELEMETRY_PARTITIONS, Topics, telemetry_partition

pytestmark = pytest.mark.kafka
RUNS = [f"run-{i}" for i in range(8)]


class Following(FoldService):
    """Follows the runs topic beside its input."""

    heard = 0

    def follows(self, partition: int) -> Sequence[Partition]:
        return [Partition(self._topics.runs, partition)]

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        own = [record for record in records if record.partition.topic in self.inputs]
        self.heard += len(records) - len(own)
        return super().apply(own, tick)


@pytest.fixture
async def bus(kafka_url: str) -> AsyncIterator[tuple[Bus, Topics]]:
    topics = Topics(f"worker-{uuid.uuid4().hex[:8]}")
    async with open_bus(kafka_url) as bus:
        await bus.init(topics.specs())
        yield bus, topics


@asynccontextmanager
async def running(bus: Bus, topics: Topics) -> AsyncIterator[tuple[Worker, Following]]:
    service = Following(topics)
    worker = Worker(
        bus,
        service,
        topics=topics,
        group=f"{topics.prefix}-fold",
        settings=WorkerSettings(checkpoint_s=0.1),
    )
    task = asyncio.create_task(worker.run())
    try:
        yield worker, service
    finally:
        worker.stop()
        await task


async def send(bus: Bus, topics: Topics, numbers: Sequence[int]) -> None:
    producer = await bus.producer()
    for number in numbers:
        await producer.publish(
            [
                Outgoing(
                    Partition(topics.telemetry, telemetry_partition(run)),
                    run.encode(),
                    b"%d" % number,
                )
                for run in RUNS
            ]
        )
    await producer.close()


async def outputs(bus: Bus, topics: Topics) -> list[tuple[str, int]]:
    partitions = [Partition(topics.issues, number) for number in range(12)]
    reader = await bus.reader(dict.fromkeys(partitions, EARLIEST))
    ends = await reader.ends(partitions)
    records: list[Record] = []
    while any([await reader.position(p) < ends[p] for p in partitions]):
        records += await reader.poll(timeout_s=1.0)
    await reader.close()
    rows = [json.loads(record.value or b"") for record in records]
    return [(row["id"], row["state"]) for row in rows]


def expected(numbers: Sequence[int]) -> dict[str, int]:
    return {k: v for run in RUNS for k, v in expected_outputs(run, numbers).items()}


async def test_members_share_take_over_and_go_on(bus: tuple[Bus, Topics]) -> None:
    on, topics = bus
    async with running(on, topics) as (first, one):
        await send(on, topics, range(10))
        assert await first.caught_up(60)
        async with running(on, topics) as (second, two):
            await until(lambda: bool(two.partitions) and second.ready.is_set())
            await send(on, topics, range(10, 20))
            await until(lambda: one.applied + two.applied >= 20 * len(RUNS))
        await send(on, topics, range(20, 30))
        await until(lambda: one.applied + two.applied >= 30 * len(RUNS))
        assert await first.caught_up(60)
        followed = {Partition(topics.runs, number) for number in one.partitions}
        producer = await on.producer()
        await producer.publish([Outgoing(partition, b"run", None) for partition in followed])
        await producer.close()
        await until(lambda: one.heard == len(followed) == TELEMETRY_PARTITIONS)
    async with running(on, topics) as (third, three):
        await send(on, topics, range(30, 35))
        assert await third.caught_up(60)
        assert three.applied == 5 * len(RUNS), "it went on from the snapshots"

    found = await outputs(on, topics)
    assert set(found) == set(expected(range(35)).items())
    assert len(found) == len(expected(range(35))), "an orderly change of members repeats nothing"
