"""A worker's ends of the bus: its producer, its place in the group, its reader beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from tocsin.bus.port import (
    EARLIEST,
    MAX_POLL_BYTES,
    AssignmentListener,
    Bus,
    BusUnavailable,
    Consumer,
    From,
    Partition,
    Producer,
    Reader,
    Record,
)
from tocsin.bus.reading import reached
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.offsets import Offsets, Positions
from tocsin.runtime.second_reader import SecondReader, SecondReading
from tocsin.runtime.service import Service
from tocsin.runtime.standby import NewestRecords, Standby
from tocsin.runtime.whole_partitions import Restored, read_whole
from tocsin.schemas.topics import ALL_RUNS, Topics, telemetry_partition

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S: Final = 1.0
_CLOSE_S: Final = 2.0
_END_S: Final = 0.5
_END_TRIES: Final = 4


class Owner(AssignmentListener, Protocol):
    """The worker, as seen from here."""

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a call into the service in its thread."""
        ...


class Wiring:
    """Opens and closes what a worker needs of a bus, and keeps records until they are taken."""

    def __init__(
        self,
        bus: Bus,
        service: Service,
        owner: Owner,
        *,
        topics: Topics,
        group: str,
        only_runs: Collection[str] | None,
        start: From | None,
        positions: Positions,
        max_records: int,
        metrics: Metrics,
        member: str | None = None,
        standby_bytes: int = 0,
    ) -> None:
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self.records: list[Record] = []
        self.polled = False
        self._bus = bus
        self._service = service
        self._owner = owner
        self._group = group
        self._only = None if only_runs is None else _partitions(topics, service.inputs, only_runs)
        self._runs = None if only_runs is None else frozenset(run.encode() for run in only_runs)
        # The ledger's keys begin with an issue instead.
        self._keyed_by_run = frozenset({topics.state, topics.runs, topics.control})
        self._start = start
        self._member = member
        self._positions = positions
        self._max_records = max_records
        self._metrics = metrics
        self._followed: list[Record] = []
        self._follower: Reader | None = None
        # Where to go on with each partition that is followed; a regained one joins here first.
        self._following: dict[Partition, int] = {}
        self._follower_reads: frozenset[Partition] = frozenset()
        self._refetch: dict[Partition, int] = {}
        self._to_check: frozenset[Partition] = frozenset()
        self._checked: dict[Partition, int] = {}
        self.second: Final = SecondReader(bus)
        """What is to be read a second time, and what came of it."""
        self._polls: dict[str, asyncio.Task[Sequence[Record]]] = {}
        self._emptied = False
        # Input partition numbers whose state is being read.
        self._restoring: frozenset[int] = frozenset()
        # The ends of what is restored of the parked ones.
        self._parked_ends: dict[Partition, int] = {}
        self._standby: Standby | None = None
        if standby_bytes and only_runs is None and service.read_ahead:
            self._standby = Standby(
                bus,
                service,
                topics=topics,
                owned=lambda: positions.kept() | self._restoring,
                limit_bytes=standby_bytes,
                metrics=metrics,
            )

    async def join(self) -> None:
        """Open what is not open, and have the polls running. Raises BusUnavailable."""
        if self.producer is None:
            self.producer = await self._bus.producer()
        if self.consumer is None:
            listener = None if self._only is not None else self._owner
            self.consumer = await self._bus.consumer(
                self._group,
                self._service.inputs,
                listener=listener,
                only=self._only,
                member=self._member,
            )
            if self._only is not None:
                await self._owner.on_assigned(frozenset(self._only))
        if self._standby is not None:
            self._standby.start()
        if "input" not in self._polls:
            while self._refetch:
                partition, offset = next(iter(self._refetch.items()))
                if partition in self.consumer.assigned():
                    await self.consumer.seek(partition, From.offset(offset))
                del self._refetch[partition]
            checking, self._to_check = self._to_check & self.consumer.assigned(), frozenset()
            places = await asyncio.gather(*(self.reached(partition) for partition in checking))
            self._checked = dict(zip(checking, places, strict=True))
            self._poll("input", self.consumer)
        full = len(self._followed) >= self._max_records
        if "followed" not in self._polls and self._follower is not None and not full:
            self._poll("followed", self._follower)
        if self.second.outdated:
            await self._stop_poll("again")
            await self.second.open()
        if "again" not in self._polls and self.second.ready:
            self._poll("again", self.second)

    async def wait(self, nudged: asyncio.Event, *, timeout_s: float) -> None:
        """Until there are records, a nudge, or the time is up. Raises BusUnavailable."""
        nudge = asyncio.create_task(nudged.wait())
        try:
            await asyncio.wait(
                {nudge, *self._polls.values()},
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            nudge.cancel()
        done = {name: task for name, task in self._polls.items() if task.done()}
        for name in done:
            del self._polls[name]
        error: BaseException | None = None
        for name, task in done.items():
            if task.cancelled():
                continue
            if (failed := task.exception()) is not None:
                error = error or failed
            elif name == "input":
                self.polled = True
                self._keep(task.result())
            elif name == "again":
                self.second.keep(task.result())
            else:
                self._followed += task.result()
        if error is not None:
            raise error

    def _keep(self, records: Sequence[Record]) -> None:
        """Until they are taken. While nothing can be applied, what is beyond a poll's number is
        read again later: polls go on, since partitions come and go within them."""
        if len(self.records) >= self._max_records:
            for record in records:
                self._refetch.setdefault(record.partition, record.offset)
            return
        size = sum(len(record.value or b"") for record in records)
        self._emptied |= len(records) < self._max_records and size < MAX_POLL_BYTES
        self.records += records

    def drain(self) -> tuple[list[Record], list[Record]]:
        """The records of the input, and those followed, that came since the last call."""
        records, followed = self.records, self._followed
        self.records, self._followed = [], []
        # Of one that is being restored all is read again.
        followed = [record for record in followed if record.partition in self._following]
        for record in followed:
            self._following[record.partition] = record.offset + 1
        return records, self._ours(followed)

    def emptied(self) -> bool:
        """Whether a poll since the last call returned all that was there: none of the partitions
        was waiting for its turn then."""
        emptied, self._emptied = self._emptied, False
        return emptied

    def refetch(self, offsets: Mapping[Partition, int]) -> None:
        """Before the next poll, go back to these offsets."""
        self._refetch.update(offsets)

    def check_positions(self, partitions: Collection[Partition]) -> None:
        """Before the next poll, check where it goes on in these."""
        self._to_check = frozenset(partitions)

    def checked_positions(self) -> Mapping[Partition, int]:
        """Where the last poll began in those that were to be checked: all before that was
        returned by then, or is not there any more. Nothing while it is under way: it may return
        what an earlier one, which was cancelled, has fetched."""
        if "input" in self._polls:
            return {}
        checked, self._checked = self._checked, {}
        return checked

    def drop(self, partitions: Collection[Partition]) -> None:
        """Drop partitions that this worker no longer owns."""
        self.records = [r for r in self.records if r.partition not in partitions]
        for partition in partitions:
            self._refetch.pop(partition, None)
            self._checked.pop(partition, None)
        self._to_check = self._to_check.difference(partitions)

    async def ends(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        """The ends of input partitions now. Raises BusUnavailable."""
        if self.consumer is None or not partitions:
            return {}
        return await self.consumer.ends(partitions)

    async def reached(self, partition: Partition) -> int:
        """Where the next poll goes on in an input partition: past what retention has removed, which
        no record says. 0 where the consumer does not know. Blocks for a second at most.
        """
        return 0 if self.consumer is None else await reached(self.consumer, partition)

    async def note_parked(self, numbers: Collection[int]) -> None:
        """Partitions are about to be parked: where what is restored of them ends now."""
        if self.consumer is not None:
            with contextlib.suppress(BusUnavailable, TimeoutError):
                self._parked_ends.update(await self.consumer.ends(self._restored_of(numbers)))

    def _restored_of(self, numbers: Collection[int]) -> list[Partition]:
        return [Partition(topic, number) for topic in self._service.restores for number in numbers]

    async def restore_partitions(
        self, partitions: Collection[Partition], lock: asyncio.Lock
    ) -> None:
        """Restore the state of input partitions, unless ours is what was written last.

        One reader for all of them: on Kafka each costs a connection. The worker's lock is not held
        while it reads: timers and checkpoints of the partitions that stayed go on.

        Raises:
            BusUnavailable: those that are not restored are not ours then.
        """
        consumer = self.consumer
        if consumer is None:
            # The port says that partitions are assigned within `poll`.
            raise BusUnavailable("partitions were assigned before there was a consumer")
        started = time.perf_counter()
        self._restoring = frozenset(p.number for p in partitions)
        try:
            async with lock:
                fresh = await self._unpark(consumer, partitions)
            followed = {p: number for number in fresh for p in self._service.follows(number)}
            whole = {p: p.number for p in self._restored_of(fresh)}
            read, states = await self._read_states(whole | followed)
            async with lock:
                await self._start_partitions(consumer, fresh, states, read.ends)
                await self._follow()
        finally:
            self._restoring = frozenset()
        if fresh:
            name, took_s = self._service.name, time.perf_counter() - started
            self._metrics.add(names.RESTORES, len(fresh), service=name)
            self._metrics.add(names.RESTORE_SECONDS, took_s, service=name)
            self._metrics.add(names.RESTORE_RECORDS, read.read, service=name)

    async def _unpark(
        self, consumer: Consumer, partitions: Collection[Partition]
    ) -> Mapping[int, Offsets]:
        """Take back what is as we left it. What was committed of the rest, by number."""
        fresh: dict[int, Offsets] = {}
        numbers = sorted({p.number for p in partitions})
        ends = await consumer.ends([*partitions, *self._restored_of(numbers)])
        found = await self._committed(consumer, {p: ends[p] for p in partitions})
        for number in numbers:
            committed = {p.topic: found[p] for p in partitions if p.number == number}
            noted = {p: self._parked_ends.pop(p, None) for p in self._restored_of([number])}
            unwritten = all(ends[p] == end for p, end in noted.items())
            if not self._positions.unpark_if_unchanged(number, committed, unwritten=unwritten):
                fresh[number] = committed
        if fresh:
            await self._owner.in_thread(self._service.release, frozenset(fresh))
            # What is followed for these alone, perhaps since before they went, is read whole again.
            for partition in self._followed_for(fresh) - self._followed_for(self._positions.kept()):
                self._following.pop(partition, None)
            self._follower_reads = frozenset()
        return fresh

    def _followed_for(self, numbers: Collection[int]) -> frozenset[Partition]:
        return frozenset(p for number in numbers for p in self._service.follows(number))

    async def _read_states(
        self, belongs: Mapping[Partition, int]
    ) -> tuple[Restored, Mapping[int, Sequence[Record]]]:
        """Those of which only one record of each key counts are reduced to it while they are read:
        a topic that was not compacted for long has many of each."""
        service = self._service
        if self._standby is None:
            newest = NewestRecords(service.order_of, limit_bytes=sys.maxsize)
        else:
            newest = self._standby.pop(belongs)
        reduced = frozenset(p for p in belongs if p.topic in service.read_ahead)
        newest.follow(reduced)
        others: dict[Partition, list[Record]] = {}

        async def sink(records: Sequence[Record]) -> None:
            ours = self._ours(records)
            newest.add(ours)
            for record in ours:
                if record.partition not in reduced:
                    others.setdefault(record.partition, []).append(record)

        ahead = newest.positions()
        read = await read_whole(self._bus, list(belongs), sink, positions=ahead)
        newest.drop_beyond(read.ends)
        rows: dict[int, list[Record]] = {}
        for partition in newest.partitions:
            rows.setdefault(belongs[partition], []).extend(newest.records(partition))
        for partition, records in others.items():
            rows.setdefault(belongs[partition], []).extend(records)
        return read, rows

    async def _start_partitions(
        self,
        consumer: Consumer,
        fresh: Mapping[int, Offsets],
        states: Mapping[int, Sequence[Record]],
        ends: Mapping[Partition, int],
    ) -> None:
        """May be cancelled between any two: what has begun is then ours, with what it follows."""
        service = self._service
        for number, committed in fresh.items():
            if rows := states.get(number):
                await self._owner.in_thread(service.restore, number, rows)
            await self._owner.in_thread(service.restored, number, committed.get(service.inputs[0]))
            for topic, offset in committed.items():
                if offset is None and self._start is not None:
                    await consumer.seek(Partition(topic, number), self._start)
            self._following.update({p: ends[p] for p in service.follows(number)})
            self._positions.start(number, committed)

    async def _committed(
        self, consumer: Consumer, ends: Mapping[Partition, int]
    ) -> Mapping[Partition, int | None]:
        """Where the group goes on in input partitions; None: where their log begins."""
        # Together: one after the other they would be as many round trips.
        offsets = await asyncio.gather(*map(consumer.committed, ends))
        found = dict(zip(ends, offsets, strict=True))

        def beyond() -> list[Partition]:
            return [p for p, offset in found.items() if offset is not None and offset > ends[p]]

        for _ in range(_END_TRIES):
            if not (gone := beyond()):
                break
            # A broker that has just become the leader knows the end a moment later.
            await asyncio.sleep(_END_S)
            ends = {**ends, **await consumer.ends(gone)}
        for partition in beyond():
            logger.warning(
                "the log ends before what was committed of it, so it is another one: it is read "
                "from its beginning",
                extra={
                    "action": self._service.name,
                    "topic": partition.topic,
                    "partition": partition.number,
                    "offset": found[partition],
                },
            )
            await consumer.seek(partition, EARLIEST)
            found[partition] = None
        return found

    async def _follow(self) -> None:
        """Follow what the owned partitions need, each from where it was. Raises BusUnavailable."""
        wanted = self._followed_for(self._positions.numbers())
        if self._follower is not None and wanted == self._follower_reads:
            return
        self._following = {p: self._following[p] for p in wanted}
        # What was followed and not taken yet is read again.
        await self._stop_poll("followed")
        self._followed = []
        # Whoever polls meanwhile must not find the one that is being closed.
        old, self._follower = self._follower, None
        if old is not None:
            await old.close()
        if wanted:
            self._follower = await self._bus.reader(
                {p: From.offset(offset) for p, offset in self._following.items()}
            )
            self._follower_reads = wanted

    async def leave(self) -> None:
        """Give the place in the group up; the producer stays."""
        await self._stop_poll("input")
        await self._stop_poll("followed")
        await self._stop_poll("again")
        self.second.want(SecondReading())
        await self.second.close()
        parts = [part for part in (self.consumer, self._follower) if part is not None]
        self.consumer = self._follower = None
        self.records, self._followed = [], []
        self._following.clear()
        self._refetch.clear()
        self._checked.clear()
        self._to_check = frozenset()
        self.polled = False
        for part in parts:
            await _close(part)

    async def close(self) -> None:
        """Close all, each within its bound."""
        await self.leave()
        if self._standby is not None:
            await self._standby.close()
        if self.producer is not None:
            await _close(self.producer)
            self.producer = None

    def _ours(self, records: Sequence[Record]) -> list[Record]:
        """Without those of other people's runs, where a key says whose they are."""
        return [
            record
            for record in records
            if self._runs is None
            or record.partition.topic not in self._keyed_by_run
            or record.key.partition(b"/")[0] in self._runs
            or record.key.startswith(b"%s/" % ALL_RUNS.encode())
        ]

    def _poll(self, name: str, reader: Reader | SecondReader) -> None:
        self._polls[name] = asyncio.create_task(
            reader.poll(timeout_s=_POLL_S, max_records=self._max_records),
            name=f"tocsin-{self._service.name}-{name}",
        )

    async def _stop_poll(self, name: str) -> None:
        task = self._polls.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


async def _close(part: Producer | Reader) -> None:
    with contextlib.suppress(TimeoutError, BusUnavailable):
        async with asyncio.timeout(_CLOSE_S):
            await part.close()


def _partitions(topics: Topics, inputs: Sequence[str], runs: Collection[str]) -> list[Partition]:
    counts = {spec.name: spec.partitions for spec in topics.specs()}
    return sorted(
        {
            Partition(topic, telemetry_partition(run) % counts[topic])
            for topic in inputs
            for run in runs
        }
    )
