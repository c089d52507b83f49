"""The worker: moves records between a bus and a service. A crash repeats, and never invents.

A checkpoint is: outputs acknowledged, then snapshots acknowledged, then offsets committed. What a
service says of records that are read again has the same ids; a state says which offset it covers.

One task drives; polls run beside it. The lock is held while records are applied, while a checkpoint
is made and while partitions come and go; never across a poll, within which they come and go, nor
while their states are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tocsin.bus.port import Bus, BusUnavailable, FencedMember, From, Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.bus_clock import BusClock
from tocsin.runtime.bus_io import Wiring
from tocsin.runtime.checkpoints import Checkpoints
from tocsin.runtime.clock import Clock, SystemClock
from tocsin.runtime.dead_letters import DeadLetterLimits, DeadLetters
from tocsin.runtime.leased_runs import Skip, SkippedRuns
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.offsets import Positions
from tocsin.runtime.second_reader import ReadAgain
from tocsin.runtime.service import Attachment, Poison, Service, StartOver, Tick
from tocsin.runtime.testing import no_crash
from tocsin.runtime.watchdog import CHECK_INTERVAL_MS, Progress, WedgedConsumer
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT_BUDGET_S: Final = 10.0
"""How long a checkpoint may take before partitions are given up, and at the end."""

_IDLE_S: Final = 1.0
_LAGGING_S: Final = 0.5
_SURE_MS: Final = 3_000
"""After so long without a round a worker asks whether it is still a member before it works on."""

_BACKOFF_S: Final = (0.1, 5.0)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Seconds between checkpoints, records per poll, limits; `software` is for dead letters.

    `standby_bytes`: how much is kept of the states of other workers' partitions, for the case that
    they come here; 0: nothing.
    """

    checkpoint_s: float = 5.0
    poll_records: int = 500
    standby_bytes: int = 0
    dead_letters: DeadLetterLimits = field(default_factory=DeadLetterLimits)
    software: str = ""


class Worker:
    """Runs one service on one bus. `run` once.

    Args:
        topics: the team's topics; they are on the bus.
        group: the consumer group whose offsets count.
        only_runs: take the partitions of these runs, without membership, and their records alone.
        member: its name in the group, where it is to be the same member after a restart.
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
        member: str | None = None,
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
        self.alive_ms: int | None = None
        """When it was last seen to be at work, or to try to reach the bus."""
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
        self._loop_thread = 0
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
        self._checkpoints = Checkpoints(
            service,
            positions=self._positions,
            skipped=self._skipped,
            in_thread=self.in_thread,
            interval_s=self._settings.checkpoint_s,
            clock=self._clock,
            metrics=self.metrics,
            crash=crash,
        )
        self._wiring = Wiring(
            bus,
            service,
            self,
            topics=topics,
            group=group,
            only_runs=only_runs,
            start=start,
            positions=self._positions,
            max_records=self._settings.poll_records,
            metrics=self.metrics,
            member=member,
            standby_bytes=self._settings.standby_bytes,
        )
        self._was_away = False
        self._rejoin = False
        # Asked for under the lock: the service may be at work in its thread at any other time.
        self._timer_ms: int | None = None
        self._progress = Progress()
        self._last_check_ms = self._sure_ms = self._clock.now_ms()

    def nudge(self) -> None:
        """Ask for a round soon. From any thread."""
        if self._loop is None or self._nudged.is_set():
            return
        if threading.get_ident() == self._loop_thread:
            self._nudged.set()
            return
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
            WedgedConsumer: the bus has more, and nothing comes.
            ConfigurationError: a topic is missing.
        """
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._service.attached(self._attachment)
        pause_s, away = _BACKOFF_S[0], False
        try:
            while not self._stopping:
                try:
                    await self._wiring.join()
                    await self._round()
                    pause_s = _BACKOFF_S[0]
                    if away:
                        away = False
                        logger.info("the bus answers again", extra={"action": self._service.name})
                    continue
                except BusUnavailable as error:
                    self.alive_ms = self._clock.now_ms()
                    message = "the bus does not answer, trying again"
                    self._complain(names.BUS_AWAY, message, error, again=away)
                    away = self._was_away = True
                    self._positions.cut_off()
                except FencedMember as error:
                    self._complain(names.FENCED, "lost the group, joining again", error)
                    await self._leave()
                except StartOver as error:
                    logger.info("%s", error, extra={"action": self._service.name})
                    await self._leave()
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_S[1])
            await self._save_before_giving_up()
        finally:
            await self._service.ended()
            await self._wiring.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until all that is on the owned partitions now is applied and committed; those that
        are given to another meanwhile are not waited for.

        False if that took longer than `timeout_s`, or the bus does not answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                ends: Mapping[Partition, int] | None = None
                while True:
                    if ends is None or not self.ready.is_set():
                        # It may have left the group meanwhile, and own nothing until it is back.
                        await self.ready.wait()
                        ends = await self._wiring.ends(self._positions.partitions())
                        if not self.ready.is_set():
                            continue  # it has left the group while it was waiting for the ends
                    self._round_done.clear()
                    behind = self._positions.behind(ends)
                    self._wiring.check_positions(behind)
                    if not behind and self._service.settled():
                        if self._checkpoints.saved:
                            return True
                        self._checkpoints.unfinished = True
                        self._nudged.set()
                    await self._round_done.wait()
        except (TimeoutError, BusUnavailable):
            return False

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a call into the service in its thread; one at a time."""
        done = await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        # A restore of many partitions is many calls, and no round.
        self.alive_ms = self._clock.now_ms()
        return done

    # -- rounds ----------------------------------------------------------------------------

    async def _round(self) -> None:
        if self._rejoin:
            raise FencedMember("partitions could not be given up or restored in order")
        if self._checkpoints.unfinished:
            async with self._lock:
                await self._checkpoint()
        await self._wiring.wait(self._nudged, timeout_s=self._until_due_s())
        if self._wiring.polled and self._positions.numbers():
            self.ready.set()
        async with self._lock:
            # The first round after a freeze may have nothing to write; the next would not ask.
            await self._make_sure()
            await self._work()
        self.last_round_ms = self.alive_ms = self._sure_ms = self._clock.now_ms()
        self._round_done.set()
        await self._check_progress(self.last_round_ms)

    async def _check_progress(self, now_ms: int) -> None:
        """Whether each partition moves: records of one say nothing about another. Raises
        WedgedConsumer, BusUnavailable."""
        if now_ms - self._last_check_ms < CHECK_INTERVAL_MS:
            return
        self._last_check_ms = now_ms
        positions = {p: self._positions.next(p) for p in self._positions.partitions()}
        ends = await self._wiring.ends(list(positions))
        self._count_lag(ends)
        if not self._wiring.emptied():
            return
        for partition, end in ends.items():
            # What retention has removed up to the end never comes, and nothing is wrong.
            if end > positions[partition]:
                reached = await self._wiring.reached(partition)
                positions[partition] = max(positions[partition], reached)
        stuck = self._progress.observe(positions, ends, now_ms)
        if stuck is not None:
            raise WedgedConsumer(
                f"no records of {stuck.topic} partition {stuck.number} arrive for "
                f"{self._progress.stuck_ms // 1000} s although there are more: this worker exits, "
                "so that its supervisor restarts it"
            )

    def _until_due_s(self) -> float:
        now_ms = self._clock.now_ms()
        due = [now_ms + 1000 * _IDLE_S]
        if self._timer_ms is not None:
            due.append(self._timer_ms + now_ms - self._timers_now_ms(now_ms))
        if (ask := self._skipped.next_ask_ms()) is not None:
            due.append(ask)
        if (save := self._checkpoints.due_ms()) is not None:
            due.append(save)
        return max(0.0, (min(due) - now_ms) / 1000)

    def _timers_now_ms(self, now_ms: int) -> int:
        """What time it is for the service's timers."""
        return now_ms - self._bus_clock.ahead_ms(now_ms) if self._service.bus_time else now_ms

    async def _work(self) -> None:
        """One round, under the lock: apply what came, fire timers, and checkpoint if it is time.

        All that waits for the bus comes first: once records are admitted, they are applied.
        """
        now_ms = self._clock.now_ms()
        timers_ms = self._timers_now_ms(now_ms)
        due = self._timer_ms is not None and self._timer_ms <= timers_ms
        ask = due or self._bus_clock.unknown(self._wiring.records)
        ends = await self._wiring.ends(self._positions.partitions()) if ask else {}
        keys = {record.key for record in self._wiring.records}
        lost = await self._skipped.refresh(keys, now_ms, served=due)
        if lost:
            # Before one of their records is left out: their states are whole up to here.
            await self.in_thread(self._service.lost, lost)
        records, beside = self._wiring.drain()
        again = self._wiring.second.drain()
        if records:
            self._crash("polled")
        self._bus_clock.observe(records, now_ms)
        self._bus_clock.observe_ends(ends, now_ms)
        ahead_ms, lag_ms = self._bus_clock.ahead_ms(now_ms), None
        if records:
            # The bus's clock may be ahead of ours: nothing was read before it was appended.
            age_ms = max(0, now_ms - min(record.append_ms for record in records))
            lag_ms = max(0, age_ms - max(0, ahead_ms))
            self.metrics.observe(names.BUS_LAG, age_ms / 1000, service=self._service.name)
        fresh, refetch = self._positions.admit(records, self._wanted)
        checked = self._wiring.checked_positions()
        moved, past = self._positions.pass_holes(
            {p: checked[p] for p in checked.keys() - refetch.keys()}
        )
        self._wiring.refetch(refetch | past)
        if ends:
            self._wiring.check_positions(self._count_lag(ends))
        fresh = [*self._skipped.released(), *fresh]
        if records or fresh or moved or self._wiring.second.wanted:
            self._checkpoints.changed(now_ms)
        nudged = self._nudged.is_set()
        self._nudged.clear()
        if fresh or beside or again.records or again.reached or due or nudged:
            proves = due and self._bus_clock.known(now_ms)
            caught_up = self._positions.caught_up(ends, now_ms, ahead_ms=ahead_ms) if proves else {}
            was_away = self._was_away and bool(fresh)
            self._was_away = self._was_away and not was_away
            owned = self._positions.numbers()
            tick = Tick(now_ms, owned, caught_up, was_away=was_away, lag_ms=lag_ms)
            started = time.perf_counter()
            poison, outputs = await self.in_thread(self._apply, fresh, beside, again, tick)
            took_s = time.perf_counter() - started
            self._count(names.APPLY_SECONDS, took_s)
            self.metrics.observe(names.ROUND, took_s, service=self._service.name)
            self._count(names.RECORDS, len(fresh))
            self._checkpoints.add([*outputs, *self._letters.bury(poison, now_ms)])
            self._letters.check(fresh, poison, now_ms)
            self._wiring.second.want(self._service.second_reading().within(owned))
            self._crash("applied")
        if self._checkpoints.is_due(now_ms):
            await self._checkpoint()
        timer = self._service.next_due_ms()
        if due and timer is not None and timer <= timers_ms:
            # A timer that waits until we have caught up is asked again, but not in a busy loop.
            timer = timers_ms + int(1000 * _LAGGING_S)
        self._timer_ms = timer

    def _apply(
        self,
        fresh: Sequence[Record],
        beside: Sequence[Record],
        again: ReadAgain,
        tick: Tick,
    ) -> tuple[Sequence[Poison], Sequence[Outgoing]]:
        consulted = [r for r in beside if r.partition.topic in self._service.inputs]
        if consulted:
            self._service.consult(consulted)
        self._service.read_again(again)
        followed = [r for r in beside if r.partition.topic not in self._service.inputs]
        poison = self._service.apply([*fresh, *followed], tick)
        return poison, self._service.outputs()

    def _wanted(self, record: Record) -> bool:
        if self._only is not None and record.key not in self._only:
            return False
        return not self._skipped.skips(record)

    # -- checkpoints -----------------------------------------------------------------------

    async def _checkpoint(self, *, force: bool = False) -> None:
        """Under the lock."""
        producer, consumer = self._wiring.producer, self._wiring.consumer
        if producer is not None and consumer is not None:
            await self._make_sure()
            await self._checkpoints.make(producer, consumer, force=force)

    async def _make_sure(self) -> None:
        """After a while without a round, ask the bus whether what is owned here still is. Raises
        FencedMember, BusUnavailable."""
        now_ms, consumer = self._clock.now_ms(), self._wiring.consumer
        if consumer is not None and now_ms - self._sure_ms > _SURE_MS:
            # Frozen, or cut off: what it holds may be another's by now, who has written it.
            await consumer.commit(self._positions.committed())
            self._sure_ms = now_ms

    async def _save_before_giving_up(self, *, locked: bool = False) -> bool:
        """The last checkpoint of some partitions, within its budget; whether it was made."""
        try:
            async with asyncio.timeout(CHECKPOINT_BUDGET_S):
                async with contextlib.nullcontext() if locked else self._lock:
                    await self._checkpoint(force=True)
            return True
        except (TimeoutError, BusUnavailable, FencedMember) as error:
            logger.warning(
                "partitions are given up without a checkpoint: records since the last one are "
                "processed again",
                extra={"action": self._service.name, "reason": str(error) or "out of time"},
            )
            return False

    # -- partitions come and go (called by the wiring, from within polls) --------------------

    async def on_revoked(self, partitions: frozenset[Partition]) -> None:
        """Called when partitions go to another member: the last chance to commit."""
        async with self._lock:
            if await self._save_before_giving_up(locked=True):
                numbers = {p.number for p in partitions}
                await self._wiring.note_parked(numbers & self._positions.numbers())
                self._positions.park(numbers)
            else:
                # What was handed out may be lost half-way, of the partitions that stay too.
                self._rejoin = True
                await self.in_thread(self._service.release, self._positions.clear())
            self._wiring.drop(partitions)
            self._checkpoints.drop({p.number for p in partitions})
            self._skipped.drop(partitions)
            self._count_partitions()
            if not self._positions.numbers():
                self.ready.clear()
        self._nudged.set()

    async def on_assigned(self, partitions: frozenset[Partition]) -> None:
        """Called when partitions are owned; none of their records is read before this returns.
        Never raises BusUnavailable into the bus."""
        numbers = {p.number for p in partitions}
        try:
            async with self._lock:
                gone = self._positions.unpark(numbers)
                await self.in_thread(self._service.release, gone)
            await self._wiring.restore_partitions(partitions, self._lock)
        except BaseException as error:
            # Of those that were not restored, or are revoked again, there may be half a state.
            await self.in_thread(self._service.release, numbers - self._positions.kept())
            if not isinstance(error, BusUnavailable):
                raise
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
            self._checkpoints.clear()
            self._rejoin = False
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

    def _count_lag(self, ends: Mapping[Partition, int]) -> Mapping[Partition, int]:
        """By how many records each partition that is not read to its end is behind."""
        behind = self._positions.behind(ends)
        self.metrics.set(names.LAG, sum(behind.values()), service=self._service.name)
        return behind

    def _count_partitions(self) -> None:
        count = len(self._positions.numbers())
        self.metrics.set(names.PARTITIONS, count, service=self._service.name)
