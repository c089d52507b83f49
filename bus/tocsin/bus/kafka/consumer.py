"""The consumer of a Kafka bus: a member of a group.

aiokafka calls a rebalance listener from its own coordinator task, at any time. The port promises to
call the listener from within `poll`. So a revocation waits, in the coordinator's task, until `poll`
has called the listener; heartbeats go on meanwhile (`GroupCoordinator.ensure_active_group` stops
them afterwards). An assignment does not wait, since no heartbeats run in that callback and a
restore takes long: it is kept until `poll` has called the listener, and until then none of its
records is read, because `getmany` names the partitions of which the listener knows. A revocation
that comes meanwhile cancels the listener: the group would take a member for dead that answers only
once its restore is over, and the next owner's would be cut off by the one after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition

from tocsin.bus.kafka.clients import KafkaReader, RequireTopics, flattened
from tocsin.bus.kafka.errors import translated
from tocsin.bus.port import AssignmentListener, FencedMember, Partition, Record, UnknownTopic

SESSION_S: Final = 10.0
"""After so long without a heartbeat a member is dead, and its partitions go to others."""

HEARTBEAT_S: Final = 1.0
"""Also how soon the others notice that somebody joined."""

REBALANCE_S: Final = 30.0
"""How long the others wait for a member that is to give up partitions: it has 10 s for its last
checkpoint."""

UNASSIGNED_S: Final = 2 * REBALANCE_S
"""After so long without an assignment, an empty one included, a client will not get one any more:
seen of clients whose broker was restarted."""

POLL_INTERVAL_S: Final = 300.0

LATE_TOPIC_S: Final = 2.0
"""How often a consumer looks for a topic of its that does not exist yet."""

_NOTHING: Final = TopicPartition("", 0)


@dataclass(slots=True)
class _Change:
    """A change of the assignment of which the listener does not know yet."""

    revoked: bool
    partitions: frozenset[Partition]
    notified: asyncio.Event = field(default_factory=asyncio.Event)


class _Bridge(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Carries changes from the coordinator's task to `poll`."""

    def __init__(self) -> None:
        self.changes: list[_Change] = []
        self.waiting = asyncio.Event()
        self.revoking = asyncio.Event()
        self.closed = False

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Waits until the listener was called; max_poll_interval bounds that for a member that
        hangs.
        """
        partitions = frozenset(Partition(*place) for place in revoked)
        if partitions and not self.closed:
            change = self._add(True, partitions)
            await change.notified.wait()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Does not wait."""
        partitions = frozenset(Partition(*place) for place in assigned)
        if not self.closed:
            # None at all says that what was revoked before it does not come back.
            self._add(False, partitions)

    def close(self) -> None:
        """Hold nobody up any more."""
        self.closed = True
        for change in self.changes:
            change.notified.set()
        self.changes.clear()

    def _add(self, revoked: bool, partitions: frozenset[Partition]) -> _Change:
        change = _Change(revoked, partitions)
        self.changes.append(change)
        self.waiting.set()
        if revoked:
            self.revoking.set()
        return change


class KafkaConsumer(KafkaReader):
    """A member of a group, or with `only` a reader with the group's offsets."""

    def __init__(
        self,
        client: AIOKafkaConsumer,
        require: RequireTopics,
        *,
        topics: Sequence[str],
        listener: AssignmentListener | None,
        request_s: float,
    ) -> None:
        super().__init__(client, require, request_s=request_s)
        self._listener = listener
        self._bridge = _Bridge()
        self._owned: frozenset[Partition] = frozenset()
        self._late = list(topics)
        self._subscribed: list[str] = []
        self._last_check_s = float("-inf")
        self._unassigned_since_s: float | None = None
        self._fetching: asyncio.Task[Any] | None = None

    def assign(self, only: Sequence[Partition]) -> None:
        """Take these partitions without membership."""
        self._late = []
        self._owned = frozenset(only)
        self._client.assign([TopicPartition(*partition) for partition in only])

    async def subscribe(self) -> None:
        """Join with those of the topics that exist; with one that does not, aiokafka would wait."""
        self._last_check_s = time.monotonic()
        there = []
        for topic in self._late:
            try:
                await self._require([topic])
                there.append(topic)
            except UnknownTopic:
                continue
        if there:
            self._late = [topic for topic in self._late if topic not in there]
            self._subscribed += there
            with translated("subscribing"):
                self._client.subscribe(self._subscribed, listener=self._bridge)
            self._unassigned_since_s = self._last_check_s

    def assigned(self) -> frozenset[Partition]:
        """The partitions that this member owns now."""
        return self._owned

    async def poll(self, *, timeout_s: float, max_records: int = 500) -> Sequence[Record]:
        """The next records, in order per partition; empty when none came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_open()
            self._check_assigned()
            if self._late and time.monotonic() - self._last_check_s >= LATE_TOPIC_S:
                await self.subscribe()
            await self._notify()
            left = max(0.0, deadline - time.monotonic())
            if self._late:
                left = min(left, LATE_TOPIC_S)
            records = await self._fetch(left, max_records)
            if records or time.monotonic() >= deadline:
                return records

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Store, for the group, the offset of the next record to be read."""
        self._check_open()
        if not offsets:
            return
        with translated("committing"):
            async with asyncio.timeout(self._request_s):
                await self._client.commit(
                    {TopicPartition(*partition): offset for partition, offset in offsets.items()}
                )

    async def committed(self, partition: Partition) -> int | None:
        """What the group stored last for that partition; None if nothing."""
        self._check_open()
        with translated("reading the committed offset"):
            async with asyncio.timeout(self._request_s):
                offset: int | None = await self._client.committed(TopicPartition(*partition))
        return offset

    def _check_assigned(self) -> None:
        """Raises FencedMember."""
        since_s = self._unassigned_since_s
        if since_s is not None and time.monotonic() - since_s > UNASSIGNED_S:
            raise FencedMember(
                f"the group has assigned nothing for {UNASSIGNED_S:g} s: create a new consumer"
            )

    def _reads(self, partition: Partition) -> bool:
        return partition in self._owned

    async def close(self) -> None:
        """Let go of resources. Leaves the group."""
        self._bridge.close()
        await super().close()

    async def _notify(self) -> None:
        """Tell the listener what has changed, in order."""
        while self._bridge.changes:
            change = self._bridge.changes[0]
            try:
                if change.revoked:
                    if self._listener is not None:
                        await self._listener.on_revoked(change.partitions)
                    self._unassigned_since_s = time.monotonic()
                else:
                    self._unassigned_since_s = None
                    self._owned |= change.partitions
                    if self._listener is not None:
                        await self._until_revoked(self._listener.on_assigned(change.partitions))
            finally:
                if change.revoked:
                    self._owned -= change.partitions
                change.notified.set()
                with suppress(ValueError):
                    self._bridge.changes.remove(change)
                if not any(left.revoked for left in self._bridge.changes):
                    self._bridge.revoking.clear()
        self._bridge.waiting.clear()

    async def _until_revoked(self, restoring: Coroutine[Any, Any, None]) -> None:
        """Run what the listener does about an assignment; end it if that is revoked meanwhile."""
        task = asyncio.ensure_future(restoring)
        revoking = asyncio.ensure_future(self._bridge.revoking.wait())
        try:
            await asyncio.wait({task, revoking}, return_when="FIRST_COMPLETED")
        finally:
            revoking.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _fetch(self, timeout_s: float, max_records: int) -> Sequence[Record]:
        """Records of what is owned; nothing as soon as the assignment changes."""
        if self._fetching is None:
            places = [TopicPartition(*partition) for partition in self._owned] or [_NOTHING]
            self._fetching = asyncio.ensure_future(
                self._client.getmany(
                    *places, timeout_ms=int(timeout_s * 1_000), max_records=max_records
                )
            )
        fetching = self._fetching
        change = asyncio.ensure_future(self._bridge.waiting.wait())
        try:
            # getmany ignores its own timeout while the group is being shared out anew.
            await asyncio.wait({fetching, change}, timeout=timeout_s, return_when="FIRST_COMPLETED")
        finally:
            change.cancel()
            # One that is done keeps its records for the next poll, should this one be cancelled.
            if not fetching.done():
                fetching.cancel()
                self._fetching = None
        if self._fetching is None:
            return ()
        self._fetching = None
        try:
            with translated("reading"):
                records = flattened(fetching.result())
        except KeyError as error:
            # A task of aiokafka 0.14 waited for an answer while its connection was replaced.
            raise FencedMember(f"reading: the client has given up ({error!r})") from error
        if any(change.revoked for change in self._bridge.changes):
            # What was fetched of a revoked partition is fetched again by its next owner.
            return ()
        return records
