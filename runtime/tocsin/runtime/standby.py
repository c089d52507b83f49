"""Hot standby: the state of partitions that other workers own, read ahead of a take-over.

A state topic has many snapshots of each key until it is compacted, and a worker that takes
partitions over reads all of them before its first record. One that stands by has read them already,
has kept the newest of each key, and reads the tail alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.bus.port import (
    EARLIEST,
    Bus,
    BusError,
    From,
    Partition,
    Reader,
    Record,
    record_size,
)
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Service
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_SETTLE_S: Final = 1.0
"""Partitions that come and go do so together: the reader is opened anew for all of them at once."""

_BACKOFF_S: Final = 5.0
_CLOSE_S: Final = 2.0


@dataclass(slots=True)
class _Kept:
    """The newest records of one partition by key, with their order. `older`: by key the last record
    of all, where it is not the newest. `position`: of the next record to be read, None before the
    first."""

    records: dict[bytes, tuple[int, Record]] = field(default_factory=dict)
    older: dict[bytes, Record] = field(default_factory=dict)
    position: int | None = None
    size: int = 0


class NewestRecords:
    """The newest record of each key of some partitions, within a limit. Pure.

    A partition is kept whole or not at all. Over the limit the largest ones are dropped: they are
    read from their beginning when they are assigned.

    Args:
        order: of the records of one key that with the highest order counts, of equals the last.
        limit_bytes: of keys, values and headers, and what Python adds to them.
    """

    def __init__(self, order: Callable[[Record], int], *, limit_bytes: int) -> None:
        self.size_bytes = 0
        self._order: Final = order
        self._limit: Final = limit_bytes
        self._kept: dict[Partition, _Kept] = {}

    @property
    def partitions(self) -> frozenset[Partition]:
        """The partitions that are followed."""
        return frozenset(self._kept)

    def follow(self, partitions: Collection[Partition]) -> None:
        """Follow these and no others; those that were followed before are kept."""
        for partition in self.partitions.difference(partitions):
            self._drop(partition)
        for partition in partitions:
            self._kept.setdefault(partition, _Kept())

    def starts(self) -> dict[Partition, From]:
        """Where to go on with each."""
        return {
            partition: EARLIEST if kept.position is None else From.offset(kept.position)
            for partition, kept in self._kept.items()
        }

    def add(self, records: Iterable[Record]) -> frozenset[Partition]:
        """Take records in, in order per partition. The partitions that had to be dropped."""
        for record in records:
            kept = self._kept.get(record.partition)
            if kept is None:
                continue
            if kept.position is not None and record.offset < kept.position:
                # Offsets went back: another log is there now.
                self._drop(record.partition)
                kept = self._kept[record.partition] = _Kept()
            kept.position = record.offset + 1
            self._apply(kept, record)
        return frozenset(self._trim())

    def records(self, partition: Partition) -> list[Record]:
        """What is kept of a partition, in order: of each key the newest, and the last one."""
        kept = self._kept.get(partition, _Kept())
        records = [record for _, record in kept.records.values()]
        records += kept.older.values()
        records.sort(key=lambda record: record.offset)
        return records

    def positions(self) -> dict[Partition, int]:
        """The offset after the last record of each partition of which one was read."""
        return {p: kept.position for p, kept in self._kept.items() if kept.position is not None}

    def pop(self, partitions: Collection[Partition]) -> NewestRecords:
        """The newest records of some partitions, which are followed no more, without a limit."""
        taken = NewestRecords(self._order, limit_bytes=sys.maxsize)
        for partition in self.partitions.intersection(partitions):
            kept = taken._kept[partition] = self._drop(partition)
            taken.size_bytes += kept.size
        return taken

    def drop_beyond(self, ends: Mapping[Partition, int]) -> None:
        """Keep nothing of a partition that ends before what was read: another log is there now."""
        for partition, position in self.positions().items():
            if position > ends.get(partition, position):
                self._drop(partition)

    def _apply(self, kept: _Kept, record: Record) -> None:
        key, change = record.key, 0
        if (last := kept.older.pop(key, None)) is not None:
            change -= record_size(last)
        before = kept.records.get(key)
        order = 0 if record.value is None else self._order(record)
        if before is not None and record.value is not None and order < before[0]:
            # Compaction will leave this one alone: whoever restores the other writes it again.
            kept.older[key] = record
            change += record_size(record)
        else:
            change -= 0 if before is None else record_size(before[1])
            kept.records.pop(key, None)
            if record.value is not None:
                kept.records[key] = order, record
                change += record_size(record)
        kept.size += change
        self.size_bytes += change

    def _trim(self) -> Iterable[Partition]:
        while self.size_bytes > self._limit:
            largest = max(self._kept, key=lambda partition: self._kept[partition].size)
            self._drop(largest)
            yield largest

    def _drop(self, partition: Partition) -> _Kept:
        kept = self._kept.pop(partition)
        self.size_bytes -= kept.size
        return kept


class Standby:
    """Reads the partitions that a worker does not own, beside its rounds.

    On the event loop. It never fails: what it could not read ahead is read at the assignment.

    Args:
        owned: the partition numbers that the worker owns now, or may at the end of a rebalance.
        limit_bytes: how much is kept.
    """

    def __init__(
        self,
        bus: Bus,
        service: Service,
        *,
        topics: Topics,
        owned: Callable[[], frozenset[int]],
        limit_bytes: int,
        metrics: Metrics,
    ) -> None:
        self._bus: Final = bus
        self._name: Final = service.name
        self._topics: Final = tuple(service.read_ahead)
        counts = {spec.name: spec.partitions for spec in topics.specs()}
        self._numbers: Final = frozenset(range(counts[service.inputs[0]]))
        self._owned: Final = owned
        self._metrics: Final = metrics
        self._kept: Final = NewestRecords(service.order_of, limit_bytes=limit_bytes)
        self._others: frozenset[int] = frozenset()
        # Whether what is kept is less than what others own: it was taken.
        self._taken = False
        # Partitions for which there was no room, until others are to be followed.
        self._left_out: frozenset[Partition] = frozenset()
        self._reader: Reader | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, once; from a coroutine."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"tocsin-{self._name}-standby")

    def pop(self, partitions: Collection[Partition]) -> NewestRecords:
        """What was read of partitions that are assigned now."""
        taken = self._kept.pop(partitions)
        self._taken = True
        self._publish()
        return taken

    async def close(self) -> None:
        """End, within 2 s."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            await self._close_reader()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_others()
                if self._reader is None:
                    await asyncio.sleep(_POLL_S)
                else:
                    await self._add(await self._reader.poll(timeout_s=_POLL_S))
            except BusError as error:
                logger.debug(
                    "the states of others cannot be read ahead now",
                    extra={"action": self._name, "reason": str(error)},
                )
                await self._close_reader()
                await asyncio.sleep(_BACKOFF_S)
            except Exception:
                logger.exception("not standing by any more", extra={"action": self._name})
                await self._close_reader()
                self._kept.follow(())
                self._left_out = frozenset()
                self._publish()
                return

    async def _follow_others(self) -> None:
        """Have the reader read what others own now. Raises BusError."""
        others = self._numbers - self._owned()
        if others != self._others or self._taken:
            await asyncio.sleep(_SETTLE_S)
            self._others, self._taken = self._numbers - self._owned(), False
            self._left_out = frozenset()
            await self._close_reader()
        if self._reader is None:
            wanted = {Partition(topic, n) for topic in self._topics for n in self._others}
            self._kept.follow(wanted - self._left_out)
            if starts := self._kept.starts():
                self._reader = await self._bus.reader(starts)

    async def _add(self, records: Sequence[Record]) -> None:
        dropped = self._kept.add(records)
        self._left_out |= dropped
        if dropped:
            logger.warning(
                "too many states of other workers to be kept for a take-over",
                extra={"action": self._name, "partitions": len(self._left_out)},
            )
            # Another one is opened, without these.
            await self._close_reader()
        self._publish()

    def _publish(self) -> None:
        self._metrics.set(names.STANDBY_BYTES, self._kept.size_bytes, service=self._name)
        self._metrics.set(names.STANDBY_LEFT_OUT, len(self._left_out), service=self._name)

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(TimeoutError, BusError):
                async with asyncio.timeout(_CLOSE_S):
                    await reader.close()
