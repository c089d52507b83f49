"""The producer of a Kafka bus and its reader without a group.

The producer is not idempotent: with the brokers gone, an idempotent one of aiokafka 0.14 keeps its
batches, and `stop`, waiting without end; a plain one fails within its request timeout. One request
in flight per broker and one batch per partition keep the order anyway.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import aiokafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from tocsin.bus.kafka.errors import CLOSE_S, explained, translated
from tocsin.bus.port import (
    BusClosed,
    BusUnavailable,
    From,
    Outgoing,
    Partition,
    Record,
    UnknownTopic,
    record_size,
)
from tocsin.schemas.errors import RecordTooLarge
from tocsin.schemas.topics import MAX_RECORD_BYTES

LINGER_MS: Final = 5
BATCH_BYTES: Final = 1024 * 1024
MAX_PARTITION_FETCH_BYTES: Final = 4 * 1024 * 1024
MAX_FETCH_BYTES: Final = 32 * 1024 * 1024

PRODUCER_OPTIONS: Final[Mapping[str, Any]] = {
    "acks": "all",
    "enable_idempotence": False,
    "compression_type": "zstd",
    "linger_ms": LINGER_MS,
    "max_batch_size": BATCH_BYTES,
    "max_request_size": MAX_RECORD_BYTES,
}
CONSUMER_OPTIONS: Final[Mapping[str, Any]] = {
    "enable_auto_commit": False,
    "auto_offset_reset": "earliest",
    "max_partition_fetch_bytes": MAX_PARTITION_FETCH_BYTES,
    "fetch_max_bytes": MAX_FETCH_BYTES,
}
MEMBER_OPTIONS: Final[Mapping[str, Any]] = {
    **CONSUMER_OPTIONS,
    # One fetch is under way to each broker. If it was for partitions that have nothing, those that
    # have more wait until it is answered: half a second by default, each time.
    "fetch_max_wait_ms": 100,
    # A leader that asked a broker which did not know the topics yet has assigned nothing to anyone.
    # It assigns anew when its metadata have changed, and asks for them every five minutes else.
    "metadata_max_age_ms": 10_000,
}
"""Of a member of a group, which may have much to catch up with."""


class _OwnThreads(logging.Filter):
    """Drops what aiokafka logs in threads that run a bus of ours; other uses of it log as before.

    While a broker is away aiokafka logs each attempt, some 15 kB a minute for each client. The port
    answers each of them with an error, of which the caller logs the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def add_current(self) -> None:
        """Count the current thread among ours for as long as it lives."""
        self._threads.add(threading.current_thread())
        # A filter of a logger does not see what the loggers below it log.
        for name in _module_names():
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging: whether to log it. Runs in the thread that logs."""
        if record.levelno >= logging.CRITICAL:
            return True
        return threading.current_thread() not in self._threads


@functools.cache
def _module_names() -> frozenset[str]:
    """Of aiokafka, which names its loggers for them; of those that are not imported yet, too."""
    folder = Path(aiokafka.__file__).parent
    names = (file.relative_to(folder.parent).with_suffix("") for file in folder.rglob("*.py"))
    return frozenset(".".join(name.parts).removesuffix(".__init__") for name in names)


own_threads: Final = _OwnThreads()

RequireTopics = Callable[[Sequence[str]], Awaitable[None]]
"""Raises UnknownTopic, if one of them does not exist, or BusUnavailable."""


class RequirePartitions(Protocol):
    """Raises UnknownTopic, if a partition does not exist, or BusUnavailable. `again`: asks
    the brokers about those that were there before, too."""

    def __call__(
        self, partitions: Sequence[Partition], /, *, again: bool = False
    ) -> Awaitable[None]: ...


async def stop(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """Stop a client within `CLOSE_S`, whatever its state."""
    with suppress(KafkaError, OSError):
        try:
            async with asyncio.timeout(CLOSE_S * 3 / 4):
                await client.stop()
        except (KafkaError, OSError):
            # It waits for brokers that do not answer, to flush or to leave its group; or it ended
            # over what had failed before, with its connections open.
            await _close_insides(client)
        except asyncio.CancelledError:
            if _cancelled():
                raise
            # A fetch that had just failed: aiokafka 0.14 cancels it, awaits it, and ends there.
            await _close_insides(client)


async def _close_insides(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """What its own `stop` would have closed next, which has no public name in a consumer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S / 4):
            if isinstance(client, AIOKafkaProducer):
                await client.client.close()
                return
            if client._fetcher is not None:
                await _close_fetcher(client._fetcher)
            if client._client is not None:
                await client._client.close()


async def _close_fetcher(fetcher: Any) -> None:
    try:
        await fetcher.close()
    except asyncio.CancelledError:
        if _cancelled():
            raise
        fetches = list(fetcher._pending_tasks)
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)


def _cancelled() -> bool:
    """Whether it is this task that is cancelled, and not something that it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class KafkaProducer:
    """Writes records; each `publish` waits for all its acknowledgements.

    `make` starts another client; may raise BusUnavailable.
    """

    def __init__(
        self,
        client: AIOKafkaProducer,
        make: Callable[[], Awaitable[AIOKafkaProducer]],
        require: RequirePartitions,
        *,
        request_s: float,
    ) -> None:
        self._client = client
        self._make = make
        self._making = asyncio.Lock()
        self._require = require
        self._request_s = request_s
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def publish(self, records: Sequence[Outgoing], /) -> Sequence[int]:
        """Append the records, in order per partition, and wait until all are acknowledged
        (durable). After BusUnavailable some of the records may be written."""
        for record in records:
            if (size := record_size(record)) > MAX_RECORD_BYTES:
                raise RecordTooLarge(size, MAX_RECORD_BYTES)
        if self._closing.done():
            raise BusClosed("this producer is closed")
        partitions = list(dict.fromkeys(record.partition for record in records))
        await self._require(partitions)
        work = asyncio.ensure_future(self._send(records))
        # Twice: a send may wait for room in the buffer, then for its acknowledgement.
        either: set[asyncio.Future[Any]] = {work, self._closing}
        try:
            await asyncio.wait(either, timeout=2 * self._request_s, return_when="FIRST_COMPLETED")
        finally:
            if not work.done():
                work.cancel()
        if work.done():
            try:
                return await work
            except UnknownTopic as error:
                # aiokafka raises this, too, when no broker has described the topic to it in time.
                await self._require(partitions, again=True)
                raise BusUnavailable(
                    "publishing: no broker sent the topic's metadata in time; try again later"
                ) from error
        with suppress(asyncio.CancelledError):
            await work
        if self._closing.done():
            raise BusClosed("the producer was closed in the meantime")
        raise BusUnavailable("publishing: no acknowledgement in time")

    async def _renew(self) -> None:
        """Use another client if this one has given up: aiokafka ends the task that sends for good
        over an error that it does not expect."""
        async with self._making:
            if self._client._sender.sender_task.done():
                client, self._client = self._client, await self._make()
                await stop(client)

    async def _send(self, records: Sequence[Outgoing]) -> Sequence[int]:
        await self._renew()
        with translated("publishing"):
            waiting: list[asyncio.Future[Any]] = []
            try:
                for record in records:
                    topic, partition = record.partition
                    waiting.append(
                        await self._client.send(
                            topic,
                            record.value,
                            record.key,
                            partition=partition,
                            headers=list(record.headers),
                        )
                    )
            finally:
                results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise explained(result, "publishing") from result
        return [result.offset for result in results if not isinstance(result, BaseException)]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.done()

    async def close(self) -> None:
        """Let go of resources; a publish under way fails with BusClosed."""
        if self._closing.done():
            return
        self._closing.set_result(None)
        await stop(self._client)


class KafkaReader:
    """Reads partitions given by the caller; belongs to no group."""

    def __init__(
        self, client: AIOKafkaConsumer, require: RequireTopics, *, request_s: float
    ) -> None:
        self._client = client
        self._require = require
        self._request_s = request_s
        self._closed = False

    async def start(self, start: Mapping[Partition, From]) -> None:
        """Take the partitions and find the places to start from. Raises BusUnavailable."""
        places = {TopicPartition(*partition): place for partition, place in start.items()}
        self._client.assign(list(places))
        with translated("finding the start offsets"):
            async with asyncio.timeout(self._request_s):
                offsets = await self._offsets(places)
        for place, offset in offsets.items():
            self._client.seek(place, offset)

    async def poll(self, *, timeout_s: float, max_records: int = 500) -> Sequence[Record]:
        """The next records, in order per partition; empty when none came within `timeout_s`."""
        self._check_open()
        # aiokafka does not suspend while it has records, and it has megabytes of each partition:
        # whoever reads them all would keep the loop for seconds, without the heartbeats of groups.
        # Behind `getmany` a cancellation would lose what that has returned.
        await asyncio.sleep(0)
        with translated("reading"):
            batches = await self._client.getmany(
                timeout_ms=max(0, int(timeout_s * 1_000)), max_records=max_records
            )
        return flattened(batches)

    async def seek(self, partition: Partition, start: From) -> None:
        """Go on from `start` in that partition."""
        self._check_open()
        self._check_reads(partition)
        place = TopicPartition(*partition)
        with translated(f"finding an offset in {partition.topic}-{partition.number}"):
            async with asyncio.timeout(self._request_s):
                offsets = await self._offsets({place: start})
        self._client.seek(place, offsets[place])

    async def position(self, partition: Partition) -> int:
        """The offset of the next record that `poll` would return."""
        self._check_open()
        self._check_reads(partition)
        with translated(f"reading the position in {partition.topic}-{partition.number}"):
            async with asyncio.timeout(self._request_s):
                position: int = await self._client.position(TopicPartition(*partition))
        return position

    async def ends(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        """The offset that the next appended record will get, per partition: lag = end -
        position."""
        self._check_open()
        await self._require(sorted({partition.topic for partition in partitions}))
        with translated("reading the end offsets"):
            async with asyncio.timeout(self._request_s):
                ends = await self._client.end_offsets(
                    [TopicPartition(*partition) for partition in partitions]
                )
        return {Partition(place.topic, place.partition): end for place, end in ends.items()}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def close(self) -> None:
        """Let go of resources."""
        if self._closed:
            return
        self._closed = True
        await stop(self._client)

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosed("this reader is closed")

    def _reads(self, partition: Partition) -> bool:
        return TopicPartition(*partition) in self._client.assignment()

    def _check_reads(self, partition: Partition) -> None:
        if not self._reads(partition):
            raise ValueError(f"this reader does not read {partition.topic}-{partition.number}")

    async def _offsets(self, places: Mapping[TopicPartition, From]) -> dict[TopicPartition, int]:
        """All of a kind with one question: each waits behind a fetch, for up to half a second."""
        found = {place: start.value for place, start in places.items() if start.kind == "offset"}
        times = {place: start.value for place, start in places.items() if start.kind == "time"}
        if times:
            answer = await self._client.offsets_for_times(times)
            found |= {place: at.offset for place, at in answer.items() if at is not None}
        earliest = [place for place, start in places.items() if start.kind == "earliest"]
        if earliest:
            found |= await self._client.beginning_offsets(earliest)
        latest = [place for place in places if place not in found]
        if latest:
            found |= await self._client.end_offsets(latest)
        return found


def flattened(batches: Mapping[TopicPartition, Sequence[ConsumerRecord]]) -> Sequence[Record]:
    """aiokafka's records as the port's."""
    found: list[Record] = []
    for place, records in batches.items():
        partition = Partition(place.topic, place.partition)
        found += [
            Record(
                partition,
                record.offset,
                record.timestamp,
                record.key or b"",
                record.value,
                tuple([(name, value or b"") for name, value in record.headers]),
            )
            for record in records
        ]
    return tuple(found)
