"""Readers of an embedded bus: `EmbeddedReader` without a group, `EmbeddedConsumer` in one."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tocsin.bus.embedded import groups, leases, log
from tocsin.bus.embedded.connection import Connection
from tocsin.bus.embedded.doorbell import Bell, Doorbell, topic_mask
from tocsin.bus.embedded.intake import Intake
from tocsin.bus.port import (
    EARLIEST,
    AssignmentListener,
    BusClosed,
    BusUnavailable,
    FencedMember,
    From,
    Partition,
    Record,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 1.0
"""A reader whose doorbell works checks by itself this often anyway."""

CHECK_INTERVAL_UNBELLED_S: Final = 0.25
"""And one without a doorbell this often: polling faster costs training time (5 ms polling: 1.15 %
of a core).
"""

MAX_DAMAGED: Final = 100
"""So many damaged records a reader reports."""

LEAVE_S: Final = 0.5
"""How long leaving a group may take; after that the others notice by the lease."""

HUNG_S: Final = 300.0
"""A member that did not poll for that long does not renew its membership."""


class EmbeddedReader:
    """Reads partitions; sleeps on a doorbell."""

    def __init__(self, connection: Connection, hang: Callable[[], Bell], intake: Intake) -> None:
        self._connection = connection
        self._intake = intake
        self._hang = hang
        self._bell = hang()
        self._positions: dict[Partition, int] = {}
        self._epoch = connection.epoch
        self._last_fetch_s = float("-inf")
        self._damaged: set[tuple[Partition, int]] = set()
        self._closed = False

    async def start(self, start: Mapping[Partition, From]) -> None:
        """Find the places to start from. Raises UnknownTopic."""
        self._positions = await self._places(start)

    async def poll(self, *, timeout_s: float, max_records: int = 500) -> Sequence[Record]:
        """The next records, in order per partition; empty when none came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_open()
            if (
                self._bell.pop()
                or time.monotonic() - self._last_fetch_s >= self._fetch_interval_s()
            ):
                records = await self._fetch(max_records)
                if records:
                    return records
            left = deadline - time.monotonic()
            if left <= 0:
                return ()
            until_fetch_s = self._last_fetch_s + self._fetch_interval_s() - time.monotonic()
            await self._bell.wait(max(0.0, min(left, until_fetch_s)))

    async def seek(self, partition: Partition, start: From) -> None:
        """Go on from `start` in that partition."""
        self._check_open()
        self._require(partition)
        self._positions.update(await self._places({partition: start}))
        self._bell.touch()

    async def position(self, partition: Partition) -> int:
        """The offset of the next record that `poll` would return."""
        self._check_open()
        return self._require(partition)

    async def ends(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        """The offset that the next appended record will get, per partition: lag = end -
        position."""
        self._check_open()
        connection, intake = self._connection, self._intake

        def job(db: sqlite3.Connection) -> Mapping[Partition, int]:
            intake.append_all(db, connection.catalogue)
            return log.ends(db, connection.catalogue, partitions)

        return await connection.run(job)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def close(self) -> None:
        """Let go of resources."""
        if self._closed:
            return
        self._closed = True
        self._bell.close()
        await self._connection.close()

    def _fetch_interval_s(self) -> float:
        return CHECK_INTERVAL_S if self._bell.works else CHECK_INTERVAL_UNBELLED_S

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosed("this reader is closed")

    def _require(self, partition: Partition) -> int:
        position = self._positions.get(partition)
        if position is None:
            raise ValueError(f"this reader does not read {partition.topic}-{partition.number}")
        return position

    async def _places(self, start: Mapping[Partition, From]) -> dict[Partition, int]:
        connection = self._connection
        return await connection.run(
            lambda db: {
                partition: log.place(db, connection.catalogue, partition, begin)
                for partition, begin in start.items()
            }
        )

    async def _fetch(self, max_records: int) -> Sequence[Record]:
        """What is there now; turns the order of the partitions, so that a full one cannot starve
        the others.
        """
        connection, positions = self._connection, dict(self._positions)
        if not self._bell.works:
            # Its file went away together with the bus, or could not be made then.
            self._bell.close()
            self._bell = self._hang()

        def job(db: sqlite3.Connection) -> tuple[log.Fetched, int]:
            if connection.epoch != self._epoch:
                # Another file: what was read of the old one is no guide to this one.
                return log.fetch(
                    db, connection.catalogue, dict.fromkeys(positions, 0), 0
                ), connection.epoch
            return log.fetch(db, connection.catalogue, positions, max_records), connection.epoch

        fetched, epoch = await connection.run(job)
        if epoch != self._epoch:
            self._start_over(epoch)
            return ()
        self._last_fetch_s = time.monotonic()
        self._report_damage(fetched.damaged)
        stale = set()
        for partition, (before, after) in fetched.moved.items():
            # A seek in the meantime wins.
            if self._positions.get(partition) == before:
                del self._positions[partition]
                self._positions[partition] = after
            else:
                stale.add(partition)
        if fetched.more or stale:
            self._bell.touch()
        if stale:
            return tuple(record for record in fetched.records if record.partition not in stale)
        return fetched.records

    def _report_damage(self, places: Sequence[tuple[Partition, int]]) -> None:
        for place in places:
            if place not in self._damaged and len(self._damaged) < MAX_DAMAGED:
                self._damaged.add(place)
                (topic, number), offset = place
                logger.error(
                    "record %d of %s partition %d is not what was written: left out. The disk or "
                    "the memory of this machine is at fault",
                    offset,
                    topic,
                    number,
                    extra={"action": "bus"},
                )

    def _start_over(self, epoch: int) -> None:
        """Another file is there: offsets of the old one do not apply to it."""
        self._epoch = epoch
        self._positions = dict.fromkeys(self._positions, 0)
        self._bell.touch()


class EmbeddedConsumer(EmbeddedReader):
    """A member of a group, or with `only` a reader with the group's offsets."""

    def __init__(
        self,
        connection: Connection,
        hang: Callable[[], Bell],
        intake: Intake,
        doorbell: Doorbell,
        *,
        group: str,
        topics: Sequence[str],
        listener: AssignmentListener | None,
    ) -> None:
        super().__init__(connection, hang, intake)
        self._doorbell = doorbell
        self._mask = topic_mask(topics)
        self.group = group
        self.topics = tuple(topics)
        self.member: str | None = None
        self._listener = listener
        self._generation = 0
        self._settled = False
        self.polled_s = time.monotonic()

    async def start_only(self, only: Sequence[Partition]) -> None:
        """Take these partitions without membership. Raises UnknownTopic."""
        self._positions = await self._committed_places(frozenset(only))

    async def join(self) -> None:
        """Become a member; partitions come with `poll`."""
        self.member = uuid.uuid4().hex
        await self._join(self.member)

    @property
    def hung(self) -> bool:
        """Whether it has not polled for too long to count as alive."""
        return time.monotonic() - self.polled_s > HUNG_S

    def assigned(self) -> frozenset[Partition]:
        """The partitions that this member owns now."""
        return frozenset(self._positions)

    async def poll(self, *, timeout_s: float, max_records: int = 500) -> Sequence[Record]:
        """The next records, in order per partition; empty when none came within `timeout_s`."""
        self.polled_s = time.monotonic()
        return await super().poll(timeout_s=timeout_s, max_records=max_records)

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Store, for the group, the offset of the next record to be read."""
        self._check_open()
        connection, group, member = self._connection, self.group, self.member

        def job(db: sqlite3.Connection) -> None:
            if connection.epoch != self._epoch and member is not None:
                raise FencedMember(
                    "the file of the bus was replaced: discard the state, then poll again to "
                    "rejoin the group"
                )
            groups.commit(db, connection.catalogue, group, offsets, member=member)

        await connection.run(job)

    async def committed(self, partition: Partition) -> int | None:
        """What the group stored last for that partition; None if nothing."""
        self._check_open()
        connection, group = self._connection, self.group
        return await connection.run(
            lambda db: groups.committed(db, connection.catalogue, group, partition)
        )

    async def close(self) -> None:
        """Let go of resources. Leaves the group."""
        if self._closed:
            return
        group, member, connection = self.group, self.member, self._connection
        if member is not None:
            self.member = None
            try:
                async with asyncio.timeout(LEAVE_S):
                    await connection.run(lambda db: groups.leave(db, group, member))
            except (TimeoutError, BusUnavailable, BusClosed):
                # The others notice by its lease.
                pass
            self._doorbell.ring(self._mask)
        await super().close()

    async def _join(self, member: str) -> None:
        group, topics, now_ms = self.group, self.topics, leases.monotonic_ms()
        await self._connection.run(lambda db: groups.join(db, group, member, topics, now_ms))
        self._doorbell.ring(self._mask)

    async def _fetch(self, max_records: int) -> Sequence[Record]:
        if self.member is not None:
            await self._settle(self.member)
        return await super()._fetch(max_records)

    async def _settle(self, member: str) -> None:
        """Bring what it owns closer to its share. The listener is notified on the way."""
        connection, group, topics = self._connection, self.group, self.topics
        known, settled = self._generation, self._settled

        def job(db: sqlite3.Connection) -> groups.Standing | None:
            if (
                settled
                and connection.epoch == self._epoch
                and groups.generation(db, group) == known
            ):
                return None
            return groups.standing(db, connection.catalogue, group, member, topics)

        standing = await connection.run(job)
        if standing is None:
            return
        held = frozenset(self._positions)
        lost = held - (standing.owned & standing.share)
        if lost:
            # Commits of what is still claimed succeed in here; of what was taken away they are
            # fenced.
            if self._listener is not None:
                await self._listener.on_revoked(lost)
            for partition in lost:
                self._positions.pop(partition, None)
            await connection.run(
                lambda db: groups.give_up(
                    db, connection.catalogue, group, member, lost & standing.owned
                )
            )
            self._doorbell.ring(self._mask)
        if not standing.member:
            self._settled = False
            self._epoch = connection.epoch
            await self._join(member)
            self._bell.touch()
            return
        wanted = standing.share - frozenset(self._positions)
        gained = await connection.run(
            lambda db: groups.claim(
                db, connection.catalogue, group, member, wanted - standing.owned
            )
        )
        gained |= wanted & standing.owned
        if gained:
            self._positions.update(await self._committed_places(gained))
        if (gained or lost) and self._listener is not None:
            await self._listener.on_assigned(gained)
        self._generation = standing.generation
        self._settled = standing.complete and standing.share == frozenset(self._positions)

    def _start_over(self, epoch: int) -> None:
        super()._start_over(epoch)
        self._settled = False

    async def _committed_places(self, partitions: frozenset[Partition]) -> dict[Partition, int]:
        connection, group = self._connection, self.group

        def job(db: sqlite3.Connection) -> dict[Partition, int]:
            places = {}
            for partition in sorted(partitions):
                offset = groups.committed(db, connection.catalogue, group, partition)
                start = EARLIEST if offset is None else From.offset(offset)
                places[partition] = log.place(db, connection.catalogue, partition, start)
            return places

        return await connection.run(job)
