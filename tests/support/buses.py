"""What the bus tests share: a bus of either kind, topics of its own, waiting for conditions."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import TopicPartition

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.log import COMPACTION_LAG_MS
from tocsin.bus.kafka.bus import KafkaBus
from tocsin.bus.port import (
    EARLIEST,
    Bus,
    BusUnavailable,
    Consumer,
    Outgoing,
    Partition,
    Reader,
    Record,
)
from tocsin.bus.urls import open_bus
from tocsin.schemas.topics import Cleanup, TopicSpec

CHILD = Path(__file__).parent / "processes" / "bus_child.py"
DEADLINE_S = 60.0
_numbers = itertools.count()


def record(partition: Partition, key: bytes = b"k", value: bytes | None = b"v") -> Outgoing:
    """One with a header."""
    return Outgoing(partition, key, value, (("tocsin-type", b"test"),))


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.02)


async def next_millisecond() -> None:
    """Wait until the machine's clock shows another one, so that append times differ."""
    now_ms = time.time_ns() // 1_000_000

    async def past() -> bool:
        return time.time_ns() // 1_000_000 > now_ms

    await until(past, "the next millisecond")


async def collect(reader: Reader, count: int) -> list[Record]:
    """Poll until there are so many records, with a deadline."""
    records: list[Record] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(records) < count:
        assert time.monotonic() < deadline, f"{len(records)} of {count} records in {DEADLINE_S} s"
        records += await reader.poll(timeout_s=0.5)
    return records


async def assigned(consumer: Consumer, count: int) -> None:
    """Poll until the consumer owns so many partitions; expects no records."""

    async def owns() -> bool:
        await consumer.poll(timeout_s=0.05)
        return len(consumer.assigned()) == count

    await until(owns, f"{count} partitions assigned")


@dataclass
class World:
    """A bus of one kind, and what only this kind can do about its insides."""

    kind: str
    url: str
    prefix: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:10]}")

    def bus(self) -> Bus:
        """Still to be entered. A dead member of a group is noticed within two seconds."""
        if self.kind == "kafka":
            return KafkaBus(
                self.url.removeprefix("kafka://").split(","), session_s=2.0, request_s=5.0
            )
        return open_bus(self.url)

    @asynccontextmanager
    async def reached(self) -> AsyncIterator[Bus]:
        """The same, as soon as it can be reached: services of tocsin wait for their bus, too."""
        async with AsyncExitStack() as stack:
            while True:
                try:
                    bus = await stack.enter_async_context(self.bus())
                    break
                except BusUnavailable:
                    await asyncio.sleep(0.5)
            yield bus

    def spec(self, cleanup: Cleanup = "delete", **options: Any) -> TopicSpec:
        """A topic of its own with 4 partitions; unless told otherwise records are kept for an hour,
        the newest of their keys for good."""
        retention_ms = 3_600_000 if cleanup == "delete" else None
        options = {"partitions": 4, "retention_ms": retention_ms} | options
        return TopicSpec(f"{self.prefix}.{next(_numbers)}", cleanup=cleanup, **options)

    def child(self, mode: str, *arguments: str) -> subprocess.Popen[str]:
        """Another process that uses this bus."""
        return subprocess.Popen(
            [sys.executable, str(CHILD), mode, self.url, *arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    async def tighten(self, spec: TopicSpec) -> None:
        """Let Kafka clean this topic at once, where it would wait for hours."""
        if self.kind == "kafka":
            settings = {
                "cleanup.policy": spec.cleanup,
                "message.timestamp.type": "LogAppendTime",
                "segment.ms": "50",
                "min.cleanable.dirty.ratio": "0.001",
                "delete.retention.ms": str(spec.tombstone_ms),
            }
            admin = await self._admin()
            try:
                await admin.alter_configs(
                    [ConfigResource(ConfigResourceType.TOPIC, spec.name, settings)]
                )
            finally:
                await admin.close()

    async def configure(self, topic: str, settings: dict[str, str]) -> None:
        """Set these of a Kafka topic, and no others; return when the broker says so, too."""
        admin = await self._admin()
        try:
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, settings)])
        finally:
            await admin.close()
        for _ in range(600):
            if settings.items() <= (await self.configuration(topic)).items():
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the broker has not taken {settings} over for {topic}")

    async def configuration(self, topic: str) -> dict[str, str]:
        """The settings of a Kafka topic."""
        admin = await self._admin()
        try:
            (answer,) = await admin.describe_configs(
                [ConfigResource(ConfigResourceType.TOPIC, topic)]
            )
        finally:
            await admin.close()
        ((*_, entries),) = answer.resources
        return {entry[0]: entry[1] for entry in entries}

    async def compact(self, bus: Bus, spec: TopicSpec) -> None:
        """Give compaction the occasion to run: time goes by, or a new segment begins."""
        if isinstance(bus, EmbeddedBus):
            now_ms = time.time_ns() // 1_000_000
            done = await bus.maintain(1_000, now_ms + COMPACTION_LAG_MS + spec.tombstone_ms + 1_000)
            assert not done.more
        else:
            producer = await bus.producer()
            await producer.publish([record(Partition(spec.name, 0), b"roll", b"on")])
            await producer.close()

    async def expire(
        self, bus: Bus, partition: Partition, before: int, *, retention_ms: int = 3_600_000
    ) -> None:
        """Drop the records below that offset, as retention does when their time is over."""
        if isinstance(bus, EmbeddedBus):
            reader = await bus.reader({partition: EARLIEST})
            end = (await reader.ends([partition]))[partition]
            times = [one.append_ms for one in await collect(reader, end)]
            await reader.close()
            oldest_kept = times[before] if before < end else times[-1] + 1
            await bus.maintain(1_000, oldest_kept + retention_ms)
        else:
            admin = await self._admin()
            try:
                place = TopicPartition(*partition)
                await admin.delete_records({place: RecordsToDelete(before)})
            finally:
                await admin.close()

    async def delete(self, topic: str) -> None:
        """Have Kafka delete a topic."""
        admin = await self._admin()
        try:
            await admin.delete_topics([topic])
        finally:
            await admin.close()

    async def delete_all(self) -> None:
        """Have Kafka delete the topics of this prefix: thousands of partitions, which nobody reads
        any more, take a tenth of a core."""
        if self.kind == "kafka":
            admin = await self._admin()
            try:
                own = [name for name in await admin.list_topics() if name.startswith(self.prefix)]
                await admin.delete_topics(own)
            finally:
                await admin.close()

    async def _admin(self) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.url.removeprefix("kafka://"))
        await admin.start()
        return admin


async def all_values(bus: Bus, partition: Partition) -> dict[bytes, list[bytes | None]]:
    """What a reader from the start finds there now, by key."""
    reader = await bus.reader({partition: EARLIEST})
    end = (await reader.ends([partition]))[partition]
    found: dict[bytes, list[bytes | None]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while await reader.position(partition) < end:
        assert time.monotonic() < deadline
        for item in await reader.poll(timeout_s=0.2):
            found.setdefault(item.key, []).append(item.value)
    await reader.close()
    return found


class Notes:
    """A listener that writes down what it was told, and may seek."""

    def __init__(self) -> None:
        self.revoked: list[frozenset[Partition]] = []
        self.assigned: list[frozenset[Partition]] = []
        self.when_revoked: Callable[[frozenset[Partition]], Awaitable[None]] | None = None
        self.when_assigned: Callable[[frozenset[Partition]], Awaitable[None]] | None = None

    async def on_revoked(self, partitions: frozenset[Partition]) -> None:
        self.revoked.append(partitions)
        if self.when_revoked is not None:
            await self.when_revoked(partitions)

    async def on_assigned(self, partitions: frozenset[Partition]) -> None:
        self.assigned.append(partitions)
        if self.when_assigned is not None:
            await self.when_assigned(partitions)


def partitions(spec: TopicSpec) -> Sequence[Partition]:
    """All of a topic."""
    return [Partition(spec.name, number) for number in range(spec.partitions)]
