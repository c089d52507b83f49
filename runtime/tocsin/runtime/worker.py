"""The worker: moves records between a bus and a service. A crash repeats, and never invents.

A checkpoint is: outputs acknowledged, then snapshots acknowledged, then offsets committed. What a
service says of records that are read again has the same ids; a state says which offset it covers.

One task drives; polls run beside it. The lock is held while records are applied, while a checkpoint
is made and while partitions come and go; never across a poll, within which they come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tocsin.bus.port import Bus, BusUnavailable, FencedMember, From, Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.bus_clock import BusClock
from tocsin.runtime.bus_io import Wiring
from tocsin.runtime.clock import Clock, SystemClock
from tocsin.runtime.dead_letters import DeadLetterLimits, DeadLetters
from tocsin.runtime.leased_runs import Skip, SkippedRuns
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.offsets import Positions
from tocsin.runtime.service import Attachment, Poison, Service, Tick
from tocsin.runtime.unacknowledged import Outbox
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT_BUDGET_S: Final = 10.0
"""How long a checkpoint may take before partitions are given up, and at the end."""

_IDLE_S: Final = 1.0
_LAGGING_S: Final = 0.5
_BACKOFF_S: Final = (0.1, 5.0)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Seconds between checkpoints, records per poll, limits; `software` is for dead letters."""

    checkpoint_s: float = 5.0
    poll_records: int = 500
    dead_letters: DeadLetterLimits = field(default_factory=DeadLetterLimits)
    software: str = ""


def no_crash(name: str) -> None:
    """The crash points of a process that is not under test."""


class Worker:
    """Runs one service on one bus. `run` once.

    Args:
        topics: the team's topics; they are on the bus.
        group: the consumer group whose offsets count.
        only_runs: take the partitions of these runs, without membership, and their records alone.
        start: where a partition begins of which the group has committed nothing; else the earliest.
        skip: whether somebody else serves a run now (asked for each run at most every 2 s); what
            becomes of its records is `Service.holds_skipped`.
        crash: called with the name of each point at which a test may end the process.
    """

    def __init__(
        self,
        bus: Bus,
        service: Service,
        *,
        topics: Topics,
        group: str,
        only_runs: Collection[str] | None = None,
        start: From | None = None,
        skip: Skip | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        settings: WorkerSettings | None = None,
        crash: Callable[[str], None] = no_crash,
    ) -> None:
        self.metrics: Final = metrics or Metrics()
        self.ready: Final = asyncio.Event()
        """Set while partitions are owned and were polled once."""
        self.last_round_ms: int | None = None
        """When the last round ended: a worker that hangs, or reaches no bus, ends none."""
        self._service = service
        only = None if only_runs is None else frozenset(only_runs)
        self._attachment = Attachment(self.nudge, only, skip)
        self._only = None if only is None else frozenset(run.encode() for run in only)
        self._clock = clock or SystemClock()
        self._settings = settings or WorkerSettings()
        self._crash = crash
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tocsin-{service.name}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged = asyncio.Event()
        self._round_done = asyncio.Event()
        self._stopping = False
        self._positions = Positions(service.inputs)
        self._bus_clock = BusClock()
        self._skipped = SkippedRuns(skip, hold=service.holds_skipped, limit=service.hold_limit)
        self._letters = DeadLetters(
            topic=topics.dlq,
            service=service.name,
            software=self._settings.software,
            limits=self._settings.dead_letters,
            metrics=self.metrics,
        )
        self._outputs = Outbox(service.name, self.metrics)
        self._snapshots = Outbox(service.name, self.metrics)
        self._wiring = Wiring(
            bus,
            service,
            self,
            topics=topics,
            group=group,
            only_runs=only_runs,
            start=start,
            positions=self._positions,
            metrics=self.metrics,
        )
        self._dirty_since_ms: int | None = None
        self._was_away = False
        self._save_now = False
        self._rejoin = False
        # Asked for under the lock: the service may be at work in its thread at any other time.
        self._timer_ms: int | None = None

    def nudge(self) -> None:
        """Ask for a round soon. From any thread."""
        if self._loop is not None:
            # A loop that was closed has no rounds left to ask for.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._nudged.set)

    def stop(self) -> None:
        """Ask `run` to make its last checkpoint and return. From the event loop's thread."""
        self._stopping = True
        self._nudged.set()

    async def run(self) -> None:
        """Work until `stop`; then a last checkpoint of at most 10 s. The bus stays open.

        Raises:
            TooManyDeadLetters: the input cannot be read.
            ConfigurationError: a topic is missing.
        """
        self._loop = asyncio.get_running_loop()
        self._service.attached(self._attachment)
        pause_s, away = _BACKOFF_S[0], False
        try:
            while not self._stopping:
                try:
                    await self._wiring.join(self._settings.poll_records)
                    await self._round()
                    pause_s = _BACKOFF_S[0]
                    if away:
                        away = False
                        logger.info("the bus answers again", extra={"action": self._service.name})
                    continue
                except BusUnavailable as error:
                    message = "the bus does not answer, trying again"
                    self._complain(names.BUS_AWAY, message, error, again=away)
                    away = self._was_away = True
                    self._positions.cut_off()
                except FencedMember as error:
                    self._complain(names.FENCED, "lost the group, joining again", error)
                    await self._leave()
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_S[1])
            await self._save_before_giving_up()
        finally:
            await self._service.ended()
            await self._wiring.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until all that stands on the owned partitions now is applied and committed.

        False if that took longer than `timeout_s`, or the bus does not answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.ready.wait()
                ends = await self._wiring.ends(self._positions.partitions())
                while True:
                    self._round_done.clear()
                    read = all(self._positions.next(p) >= end for p, end in ends.items())
                    if read and self._service.settled():
                        if self._dirty_since_ms is None:
                            return True
                        self._save_now = True
                        self._nudged.set()
                    await self._round_done.wait()
        except (TimeoutError, BusUnavailable):
            return False

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a call into the service in its thread; one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    # -- rounds ----------------------------------------------------------------------------

    async def _round(self) -> None:
        if self._rejoin:
            raise FencedMember("partitions could not be given up or restored in order")
        if self._save_now:
            async with self._lock:
                await self._checkpoint()
        await self._wiring.wait(self._nudged, timeout_s=self._until_due_s())
        if self._wiring.polled and self._positions.numbers():
            self.ready.set()
        async with self._lock:
            await self._work()
        self.last_round_ms = self._clock.now_ms()
        self._round_done.set()

    def _until_due_s(self) -> float:
        now_ms = self._clock.now_ms()
        due = [now_ms + 1000 * _IDLE_S]
        if self._timer_ms is not None:
            due.append(self._timer_ms)
        if (ask := self._skipped.next_ask_ms()) is not None:
            due.append(ask)
        if self._dirty_since_ms is not None:
            due.append(self._dirty_since_ms + 1000 * self._settings.checkpoint_s)
        return max(0.0, (min(due) - now_ms) / 1000)

    async def _work(self) -> None:
        """One round, under the lock: apply what came, fire timers, and checkpoint if it is time.

        All that waits for the bus comes first: once records are admitted, they are applied.
        """
        now_ms = self._clock.now_ms()
        due = self._timer_ms is not None and self._timer_ms <= now_ms
        ask = due or self._bus_clock.unknown(self._wiring.records)
        ends = await self._wiring.ends(self._positions.partitions()) if ask else {}
        await self._skipped.refresh({r.key for r in self._wiring.records}, now_ms)
        records, beside = self._wiring.drain()
        if records:
            self._crash("polled")
        self._bus_clock.heard(records, now_ms)
        self._bus_clock.asked(ends)
        if records:
            # The bus's clock may be ahead of ours: nothing was read before it was appended.
            lag_ms = max(0, now_ms - min(record.append_ms for record in records))
            self.metrics.observe(names.BUS_LAG, lag_ms / 1000, service=self._service.name)
        fresh, refetch = self._positions.admit(records, self._wanted)
        self._wiring.refetch(refetch)
        fresh = [*self._skipped.released(), *fresh]
        if (records or fresh) and self._dirty_since_ms is None:
            self._dirty_since_ms = now_ms
        nudged = self._nudged.is_set()
        self._nudged.clear()
        if fresh or beside or due or nudged:
            ahead_ms = self._bus_clock.ahead_ms(now_ms)
            caught_up = self._positions.caught_up(ends, now_ms, ahead_ms=ahead_ms) if due else {}
            was_away = self._was_away and bool(fresh)
            self._was_away = self._was_away and not was_away
            tick = Tick(now_ms, self._positions.numbers(), caught_up, was_away=was_away)
            started = time.perf_counter()
            poison, outputs = await self.in_thread(self._apply, fresh, beside, tick)
            took_s = time.perf_counter() - started
            self._count(names.APPLY_SECONDS, took_s)
            self.metrics.observe(names.ROUND, took_s, service=self._service.name)
            self._count(names.RECORDS, len(fresh))
            self._outputs.add([*outputs, *self._letters.bury(poison, now_ms)])
            self._letters.check(fresh, poison, now_ms)
            self._crash("applied")
        if self._checkpoint_is_due(now_ms):
            await self._checkpoint()
        timer = self._service.next_due_ms()
        if due and timer is not None and timer <= now_ms:
            # A timer that waits until we have caught up is asked again, but not in a busy loop.
            timer = now_ms + int(1000 * _LAGGING_S)
        self._timer_ms = timer

    def _apply(
        self, fresh: Sequence[Record], beside: Sequence[Record], tick: Tick
    ) -> tuple[Sequence[Poison], Sequence[Outgoing]]:
        consulted = [r for r in beside if r.partition.topic in self._service.inputs]
        if consulted:
            self._service.consult(consulted)
        followed = [r for r in beside if r.partition.topic not in self._service.inputs]
        poison = self._service.apply([*fresh, *followed], tick)
        return poison, self._service.outputs()

    def _wanted(self, record: Record) -> bool:
        if self._only is not None and record.key not in self._only:
            return False
        return not self._skipped.skips(record)

    # -- checkpoints -----------------------------------------------------------------------

    def _checkpoint_is_due(self, now_ms: int) -> bool:
        if self._outputs or self._service.wants_checkpoint():
            return True
        dirty = self._dirty_since_ms
        return dirty is not None and now_ms >= dirty + 1000 * self._settings.checkpoint_s

    async def _checkpoint(self, *, force: bool = False) -> None:
        """Under the lock. What could not be written stays for the next try."""
        producer, consumer = self._wiring.producer, self._wiring.consumer
        if producer is None or consumer is None:
            return
        self._save_now = True
        started = time.perf_counter()
        await self._outputs.flush(producer)
        self._crash("outputs_acknowledged")
        snapshots = await self.in_thread(lambda: self._service.snapshots(force=force))
        self._outputs.add(self._service.outputs() if force else ())
        await self._outputs.flush(producer)
        self._snapshots.add(snapshots)
        await self._snapshots.flush(producer)
        self._crash("snapshots_acknowledged")
        # What a snapshot that does not fit was made of is read again after a restart.
        held = self._snapshots.left_out(self._service.restores)
        offsets = self._positions.to_commit(self._committable)
        offsets = {p: offset for p, offset in offsets.items() if p.number not in held}
        if offsets:
            await consumer.commit(offsets)
            self._positions.was_committed(offsets)
        self._crash("committed")
        self._save_now, self._dirty_since_ms = False, None
        self._count(names.CHECKPOINTS, 1)
        self._count(names.CHECKPOINT_SECONDS, time.perf_counter() - started)
        if not force:
            await self._service.checkpointed(self._clock.now_ms())

    def _committable(self, partition: Partition, offset: int) -> int:
        offset = self._skipped.before(partition, offset)
        return self._service.committable(partition.number, offset)

    async def _save_before_giving_up(self, *, locked: bool = False) -> bool:
        """The last checkpoint of some partitions, within its budget; whether it was made."""
        try:
            async with asyncio.timeout(CHECKPOINT_BUDGET_S):
                async with contextlib.nullcontext() if locked else self._lock:
                    await self._checkpoint(force=True)
            return True
        except (TimeoutError, BusUnavailable, FencedMember) as error:
            logger.warning(
                "given up without a checkpoint: what came since the last one is done again",
                extra={"action": self._service.name, "reason": str(error) or "out of time"},
            )
            return False

    # -- partitions come and go (called by the wiring, from within polls) --------------------

    async def on_revoked(self, partitions: frozenset[Partition]) -> None:
        """See `tocsin.bus.port.AssignmentListener`."""
        async with self._lock:
            if await self._save_before_giving_up(locked=True):
                self._positions.park({p.number for p in partitions})
            else:
                # What was handed out may be lost half-way, of the partitions that stay too.
                self._rejoin = True
                await self.in_thread(self._service.release, self._positions.clear())
            self._wiring.drop(partitions)
            self._snapshots.drop({p.number for p in partitions})
            self._skipped.drop(partitions)
            self._count_partitions()
        self._nudged.set()

    async def on_assigned(self, partitions: frozenset[Partition]) -> None:
        """See `tocsin.bus.port.AssignmentListener`. Never raises BusUnavailable into the bus."""
        async with self._lock:
            try:
                gone = self._positions.unpark({p.number for p in partitions})
                await self.in_thread(self._service.release, gone)
                await self._wiring.take_partitions(partitions)
                await self._wiring.follow()
            except BusUnavailable as error:
                self._complain(names.BUS_AWAY, "partitions not restored, joining again", error)
                self._rejoin = True
            self._count_partitions()
        self._nudged.set()

    async def _leave(self) -> None:
        """Drop all state and the membership: what was not committed is another's now."""
        await self._wiring.leave()
        async with self._lock:
            await self.in_thread(self._service.release, self._positions.clear())
            self._skipped.clear()
            self._outputs.clear()
            self._snapshots.clear()
            self._dirty_since_ms = None
            self._save_now = self._rejoin = False
            self.ready.clear()
            self._count_partitions()

    # -- small things ----------------------------------------------------------------------

    async def _pause(self, seconds: float) -> None:
        """Before the next try; ended by `stop`."""
        if not self._stopping:
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._nudged.wait()

    def _complain(self, name: str, message: str, error: Exception, *, again: bool = False) -> None:
        """Count it; log it with its reason, the repeats of one outage for debugging only."""
        self._count(name, 1)
        level = logging.DEBUG if again else logging.WARNING
        logger.log(level, "%s: %s", message, error, extra={"action": self._service.name})

    def _count(self, name: str, amount: float) -> None:
        self.metrics.add(name, amount, service=self._service.name)

    def _count_partitions(self) -> None:
        count = len(self._positions.numbers())
        self.metrics.set(names.PARTITIONS, count, service=self._service.name)
