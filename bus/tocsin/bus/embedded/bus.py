"""The embedded bus: one SQLite file, several processes of one machine, no server.

Trainings write beside it (`tocsin.bus.embedded.spool`). What they wrote before a bus was opened,
before a publish, or before one asks for ends, is in the bus from then on; a bus on which something
reads takes in the rest as it comes.

Beside the port it has `maintain`. A bus on which consumers are open does its housekeeping by
itself; one that only writes or reads without a group (a launcher, a listener) never does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tocsin.bus.embedded import groups, leases, maintenance, tables
from tocsin.bus.embedded.connection import BUSY_S, WAL_BYTES, BusFile, Connection
from tocsin.bus.embedded.doorbell import ALL_TOPICS, Bell, Doorbell, topic_mask
from tocsin.bus.embedded.intake import Intake, Turn
from tocsin.bus.embedded.log import append
from tocsin.bus.embedded.maintenance import Maintenance
from tocsin.bus.embedded.reader import (
    CHECK_INTERVAL_S,
    CHECK_INTERVAL_UNBELLED_S,
    EmbeddedConsumer,
    EmbeddedReader,
)
from tocsin.bus.embedded.spool import SPOOL
from tocsin.bus.port import (
    AssignmentListener,
    BusClosed,
    BusUnavailable,
    From,
    Outgoing,
    Partition,
    TopicState,
    UnusableBus,
)
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import TopicSpec

logger = logging.getLogger(__name__)

MAINTENANCE_S: Final = 5.0
"""Pause between rounds of housekeeping when there is nothing more to do."""

SLICE_MS: Final = 15.0
"""Milliseconds of one round; between rounds that leave work the writers have the file for
themselves.
"""

MAINTENANCE_TTL_MS: Final = int(3_000 * MAINTENANCE_S)

_BUSY_PAUSE_S: Final = 0.1
_MAINTENANCE_LEASE: Final = "_maintenance"


class EmbeddedProducer:
    """Writes records, one transaction per `publish`."""

    def __init__(
        self, connection: Connection, doorbell: Doorbell, intake: Intake, clock: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._doorbell = doorbell
        self._intake = intake
        self._clock = clock
        self._unchecked_bytes = 0

    async def publish(self, records: Sequence[Outgoing], /) -> Sequence[int]:
        """Append the records, in order per partition, and wait until all are acknowledged
        (durable). On this bus all records are written, or none."""
        if not records:
            return ()
        connection, doorbell, clock = self._connection, self._doorbell, self._clock
        intake = self._intake
        mask = topic_mask({record.partition.topic for record in records})

        def job(db: sqlite3.Connection) -> Sequence[int]:
            # What was acknowledged to a training before comes before.
            intake.append_all(db, connection.catalogue)
            offsets = append(db, connection.catalogue, records, clock())
            doorbell.ring(mask)
            return offsets

        offsets = await connection.run(job)
        self._unchecked_bytes += sum(len(record.value or b"") for record in records)
        if self._unchecked_bytes >= WAL_BYTES:
            # Takes tens of milliseconds, for the disk must have it: not while somebody waits.
            self._unchecked_bytes = 0
            connection.post(tables.checkpoint)
        return offsets

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._connection.closed

    async def close(self) -> None:
        """Let go of resources; a publish under way fails with BusClosed."""
        await self._connection.close()


class _Lease:
    """A lease of this bus; renewed by its beat."""

    def __init__(self, bus: EmbeddedBus, name: str, holder: str) -> None:
        self.name = name
        self.holder = holder
        self._bus = bus

    async def release(self) -> None:
        """Give it back now."""
        await self._bus.release(self)


class EmbeddedBus:
    """One bus file. `create` False refuses a file that is missing; `clock` gives append times."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        notice: str | None = None,
        clock: Callable[[], int] = unix_ms,
        busy_s: float = BUSY_S,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._notice = notice
        self._file = BusFile(self.path, create=create, busy_s=busy_s)
        self._clock = clock
        self._control: Connection | None = None
        self._doorbell: Doorbell | None = None
        self._intake: Intake | None = None
        self._parts: list[EmbeddedProducer | EmbeddedReader] = []
        self._leases: dict[str, _Lease] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        """How to reach it, without secrets: `embedded:PATH` or `kafka://HOST:PORT`."""
        return f"embedded:{self.path}"

    @property
    def notice(self) -> str | None:
        """One line for a person, when the bus is not where one would look; None otherwise."""
        return self._notice

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableBus or BusUnavailable."""
        control = Connection(self._file, "bus")
        await control.open()
        doorbell: Doorbell | None = None
        try:
            doorbell = Doorbell(self.path)
            intake = Intake(self.path, doorbell, self._clock)
            with suppress(BusUnavailable):
                # Busy: it is taken in a moment later.
                await control.run(lambda db: intake.append_all(db, control.catalogue))
        except BaseException:
            # Else each attempt of one that tries again leaves a thread and two files open.
            if doorbell is not None:
                doorbell.close()
            await control.close()
            raise
        self._control, self._doorbell, self._intake = control, doorbell, intake
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all that was made of this bus; leases end."""
        control, doorbell = self._control, self._doorbell
        if control is None or doorbell is None:
            return
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(part.close() for part in self._parts))
        self._parts.clear()
        try:
            async with asyncio.timeout(1.0):
                for lease in list(self._leases.values()):
                    await self.release(lease)
        except (TimeoutError, BusUnavailable, BusClosed, UnusableBus):
            # They end by themselves, some seconds later.
            self._leases.clear()
        self._control = self._doorbell = self._intake = None
        doorbell.close()
        await control.close()

    async def init(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Create the topics that are missing; never change one that exists."""
        control, doorbell, _ = self._open()
        await control.run(lambda db: tables.create_topics(db, specs))
        self._file.topics = await control.run(tables.topic_specs)
        doorbell.ring(ALL_TOPICS)
        return await self.show(specs)

    async def show(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Compare the topics with what they should be."""
        control, _, _ = self._open()
        return await control.run(lambda db: tables.topic_states(db, specs))

    async def producer(self) -> EmbeddedProducer:
        """A new producer."""
        _, doorbell, intake = self._open()
        connection = await self._connect("producer")
        producer = EmbeddedProducer(connection, doorbell, intake, self._clock)
        self._keep(producer)
        return producer

    async def reader(self, start: Mapping[Partition, From]) -> EmbeddedReader:
        """A reader of these partitions from these places."""
        _, _, intake = self._open()
        topics = {partition.topic for partition in start}
        connection = await self._connect("reader")
        reader = EmbeddedReader(connection, lambda: Bell.hang(self.path, topics), intake)
        self._keep(reader)
        self._start("intake", self._run_intake)
        try:
            await reader.start(start)
        except BaseException:
            await reader.close()
            raise
        return reader

    async def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        listener: AssignmentListener | None = None,
        only: Sequence[Partition] | None = None,
        member: str | None = None,
    ) -> EmbeddedConsumer:
        """A member of `group`, which begins at the committed offset, else at the earliest
        record."""
        _, doorbell, intake = self._open()
        connection = await self._connect("consumer")
        consumer = EmbeddedConsumer(
            connection,
            lambda: Bell.hang(self.path, topics),
            intake,
            doorbell,
            group=group,
            topics=topics,
            listener=listener,
        )
        self._keep(consumer)
        try:
            if only is None:
                await consumer.join()
            else:
                await consumer.start_only(only)
        except BaseException:
            await consumer.close()
            raise
        self._start("beat", self._beat)
        self._start("intake", self._run_intake)
        self._start("maintenance", self._keep_house)
        return consumer

    async def lease(self, name: str) -> _Lease | None:
        """Claim `name`, or None while somebody else holds it."""
        control, _, _ = self._open()
        lease = _Lease(self, name, uuid.uuid4().hex)
        now_ms = leases.monotonic_ms()
        if not await control.run(lambda db: leases.claim(db, name, lease.holder, now_ms)):
            return None
        self._leases[lease.holder] = lease
        self._start("beat", self._beat)
        return lease

    async def release(self, lease: _Lease) -> None:
        """End a lease of this bus; a second time does nothing."""
        if self._leases.pop(lease.holder, None) is None:
            return
        control, _, _ = self._open()
        await control.run(lambda db: leases.release(db, lease.name, lease.holder))

    async def leased(self, name: str) -> bool:
        """Whether somebody who lives holds `name`."""
        control, _, _ = self._open()
        now_ms = leases.monotonic_ms()
        return await control.run(lambda db: leases.held(db, name, now_ms))

    async def maintain(self, budget_ms: float = SLICE_MS, now_ms: int | None = None) -> Maintenance:
        """Housekeeping for about `budget_ms`; `now_ms` is what ages are counted from, else the
        bus's clock.

        Raises BusUnavailable.
        """
        control, _, _ = self._open()
        now = self._clock() if now_ms is None else now_ms
        return await control.run(lambda db: maintenance.maintain(db, budget_ms, now))

    def _open(self) -> tuple[Connection, Doorbell, Intake]:
        if self._control is None or self._doorbell is None or self._intake is None:
            raise BusClosed(f"the bus {self.url} is not open")
        return self._control, self._doorbell, self._intake

    def _keep(self, part: EmbeddedProducer | EmbeddedReader) -> None:
        """To be closed with the bus, unless it was closed before."""
        self._parts = [*(kept for kept in self._parts if not kept.closed), part]

    async def _connect(self, name: str) -> Connection:
        connection = Connection(self._file, name)
        await connection.open()
        return connection

    def _start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(work(), name=f"tocsin-bus-{name}")

    async def _run_intake(self) -> None:
        """Take in what trainings write, as it comes."""
        control, _, intake = self._open()
        turn, bell = Turn(self.path), None
        failing = False
        try:
            while True:
                if turn.acquire():
                    if bell is not None and not bell.works:
                        bell.close()
                        bell = None
                    if bell is None:
                        bell = Bell.hang(self.path, {SPOOL})
                    bell.pop()
                try:
                    await control.run(lambda db: intake.append_all(db, control.catalogue))
                    failing = False
                except (BusUnavailable, UnusableBus) as error:
                    level = logging.DEBUG if failing else logging.WARNING
                    logger.log(level, "spools not taken in: %s", error, extra={"action": "intake"})
                    failing = True
                if bell is None:
                    await asyncio.sleep(CHECK_INTERVAL_S)
                else:
                    await bell.wait(CHECK_INTERVAL_S if bell.works else CHECK_INTERVAL_UNBELLED_S)
        finally:
            turn.close()
            if bell is not None:
                bell.close()

    async def _beat(self) -> None:
        """Renew leases and memberships, and end those of the dead."""
        control, doorbell, _ = self._open()
        while True:
            await asyncio.sleep(leases.BEAT_S)
            consumers = [
                part
                for part in self._parts
                if isinstance(part, EmbeddedConsumer) and part.member is not None and not part.hung
            ]
            held = list(self._leases.values())
            if not consumers and not held:
                continue

            def job(
                db: sqlite3.Connection,
                consumers: Sequence[EmbeddedConsumer] = consumers,
                held: Sequence[_Lease] = held,
            ) -> int:
                mask, now_ms = 0, leases.monotonic_ms()
                with tables.transaction(db, write=True):
                    for lease in held:
                        leases.renew(db, lease.name, lease.holder, now_ms)
                    for consumer in consumers:
                        member = consumer.member
                        if member is not None and groups.renew(db, consumer.group, member, now_ms):
                            mask |= topic_mask(consumer.topics)
                return mask

            try:
                doorbell.ring(await control.run(job))
            except (BusUnavailable, UnusableBus) as error:
                logger.warning(
                    "bus lease not renewed", extra={"action": "beat", "reason": str(error)}
                )

    async def _keep_house(self) -> None:
        """Housekeeping, in one process at a time."""
        control, _, _ = self._open()
        holder = uuid.uuid4().hex
        pause_s = MAINTENANCE_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                mine = await control.run(
                    lambda db: leases.claim(
                        db, _MAINTENANCE_LEASE, holder, leases.monotonic_ms(), MAINTENANCE_TTL_MS
                    )
                )
                done = await self.maintain() if mine else None
            except (BusUnavailable, UnusableBus) as error:
                logger.warning(
                    "bus not maintained", extra={"action": "maintain", "reason": str(error)}
                )
                done = None
            pause_s = _BUSY_PAUSE_S if done is not None and done.more else MAINTENANCE_S
