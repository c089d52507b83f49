"""Partitions stay with the worker that has them, as far as an even share allows: each that moves is
restored elsewhere.

On Kafka alone: workers of a bus file share its partitions in an order of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from support.at_work import at_work
from support.buses import World
from support.rules.fold_service import FoldService
from support.waiting import until
from tocsin.bus.kafka.consumer import HEARTBEAT_S
from tocsin.bus.port import Bus
from tocsin.bus.urls import open_bus
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import TELEMETRY_PARTITIONS, Topics

pytestmark = pytest.mark.kafka

HALF, THIRD = TELEMETRY_PARTITIONS // 2, TELEMETRY_PARTITIONS // 3


@pytest.fixture
async def bus(kafka_url: str) -> AsyncIterator[Bus]:
    """With the time that a worker has for its restart."""
    async with open_bus(kafka_url) as opened:
        yield opened


@pytest.fixture
async def topics(bus: Bus, kafka_url: str) -> AsyncIterator[Topics]:
    world = World("kafka", kafka_url)
    topics = Topics(world.prefix)
    # No more of them: a broker takes long to create hundreds of partitions.
    needed = (topics.telemetry, topics.state)
    await bus.init([spec for spec in topics.specs() if spec.name in needed])
    yield topics
    await world.delete_all()


@asynccontextmanager
async def working(
    bus: Bus, topics: Topics, member: str | None = None
) -> AsyncIterator[FoldService]:
    """A worker, until it is stopped as by its supervisor; its service knows what it has."""
    service = FoldService(topics)
    worker = Worker(
        bus,
        service,
        topics=topics,
        group=f"{topics.prefix}-fold",
        member=member,
        settings=WorkerSettings(checkpoint_s=0.1),
    )
    async with at_work(worker):
        yield service


async def shared(*services: FoldService) -> None:
    """Wait until they have an equal share each, and together all."""

    def are_even() -> bool:
        counts = [len(one.partitions) for one in services]
        owned = {number for one in services for number in one.partitions}
        return len(set(counts)) == 1 and len(owned) == sum(counts) == TELEMETRY_PARTITIONS

    await until(are_even, what=f"{len(services)} workers share the partitions")


@pytest.mark.parametrize("names", [(None, None), ("a", "b")], ids=["without names", "with names"])
async def test_each_worker_keeps_what_it_can_when_another_joins_and_leaves(
    bus: Bus, topics: Topics, names: tuple[str | None, str | None]
) -> None:
    async with AsyncExitStack() as stack:
        stay = [await stack.enter_async_context(working(bus, topics, name)) for name in names]
        await shared(*stay)
        before, restored = [set(one.partitions) for one in stay], [len(s.restored_at) for s in stay]
        async with working(bus, topics) as third:
            await shared(*stay, third)
            for one, had in zip(stay, before, strict=True):
                assert one.partitions.keys() < had, "it has given up, and got no other"
            assert [len(one.restored_at) for one in stay] == restored, "nothing was read again"
            between = [set(one.partitions) for one in stay]
        await shared(*stay)
        for one, had, count in zip(stay, between, restored, strict=True):
            assert one.partitions.keys() > had, "it has kept all, and got more"
            assert len(one.restored_at) == count + HALF - THIRD, "only these were read"


@pytest.mark.parametrize("leads", [True, False], ids=["the leader", "another"])
async def test_a_worker_that_restarts_with_its_name_moves_no_partition(
    bus: Bus, topics: Topics, leads: bool
) -> None:
    async with AsyncExitStack() as goes, AsyncExitStack() as stays:
        # The first of a group shares out.
        order = [(goes, "a"), (stays, "b")] if leads else [(stays, "b"), (goes, "a")]
        services = {
            name: await s.enter_async_context(working(bus, topics, name)) for s, name in order
        }
        await shared(*services.values())
        before, other = set(services["a"].partitions), services["b"]
        events = list(other.restored_at), list(other.forgotten)
        await goes.aclose()
        # As long as a process takes to start: the other would have heard that it is gone.
        await asyncio.sleep(3 * HEARTBEAT_S)
        async with working(bus, topics, "a") as again:
            await until(lambda: len(again.partitions) == HALF, what="its partitions are back")
            assert again.partitions.keys() == before
            assert (other.restored_at, other.forgotten) == events, "nobody else was disturbed"
