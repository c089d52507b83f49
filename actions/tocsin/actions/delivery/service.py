"""The action service: issues in, deliveries and signed stops out, with the ledger between them.

Everything that is decided is decided in `apply`, in the worker's thread, and is on the actions
topic before anything is sent (`checkpointed`). What came of an attempt goes through an inbox into
the next `apply`, so the ledger has one writer and each state is written once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Decision, RetryPolicy
from tocsin.actions.delivery.control_records import ControlRecords
from tocsin.actions.delivery.due_deliveries import DueDeliveries
from tocsin.actions.delivery.followed_runs import FollowedRuns
from tocsin.actions.delivery.followed_stops import FollowedStops
from tocsin.actions.delivery.ledger_writer import LedgerWriter
from tocsin.actions.delivery.notices import Notices
from tocsin.actions.delivery.planner import Intent, Planner
from tocsin.actions.delivery.receiver_queues import Attempted, ReceiverQueue, ReceiverQueues
from tocsin.actions.delivery.setup import InThread, SetUp, Setup
from tocsin.actions.digests.digests import Digests, ReadDigest
from tocsin.actions.ledger.ledger import Ledger
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Attachment, Poison, Service, Tick
from tocsin.schemas.errors import MalformedRecord, RecordError
from tocsin.schemas.records.deliveries import REPEAT, Delivery
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.wire import read_event
from tocsin.schemas.signing import TrustedKeys
from tocsin.schemas.topics import (
    ISSUE_PARTITIONS,
    TELEMETRY_PARTITIONS,
    Topics,
    telemetry_partition,
)

logger = logging.getLogger(__name__)

_AFTER_A_BUG_MS: Final = 60_000


class ActionsService(Service):
    """A service for `tocsin.runtime.worker.Worker`; made by `tocsin.actions.composition`.

    Args:
        setup: what the configuration means.
        closers: called at the end, after the receivers were closed.
        find_queue: makes the queue of a receiver that is not among them; may block.
        set_up: what another configuration would mean, for `use`.
        trusted: the keys of those whose silences count; may block.
        read_digest: reads what is in a digest; None: there are none.
    """

    name = "actions"
    holds_skipped = True
    keeps_state = False

    def __init__(
        self,
        topics: Topics,
        setup: Setup,
        *,
        requested_by: str = "actions",
        policy: RetryPolicy | None = None,
        metrics: Metrics | None = None,
        crash: Callable[[str], None] = lambda name: None,
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
        find_queue: Callable[[str], ReceiverQueue | None] = lambda name: None,
        set_up: SetUp | None = None,
        trusted: Callable[[], TrustedKeys] = lambda: TrustedKeys(()),
        read_digest: ReadDigest | None = None,
    ) -> None:
        self.inputs = (topics.issues,)
        self._topics = topics
        self._only: frozenset[str] | None = None
        self._requested_by = requested_by
        self._close_receivers = setup.close
        self.set_up = set_up
        self._metrics = metrics or Metrics()
        self._queues = ReceiverQueues(
            setup.queues,
            self._report,
            crash=crash,
            closers=closers,
            find=find_queue,
            metrics=metrics,
        )
        self._ledger = Ledger(policy)
        self._writer = LedgerWriter(self._ledger, topics, setup.failures, self._metrics)
        self._control = ControlRecords(trusted)
        self._runs = FollowedRuns()
        self._planner = Planner(
            setup.decisions, self._ledger, self._queues.acknowledges, self._control, self._runs
        )
        self._stops = FollowedStops(self._ledger, self._runs, self._control, setup.backends)
        issues = (topics.issues,) if self._planner.needs_issues else ()
        self.restores = (topics.actions, *issues)
        self._silences_over: list[Outgoing] = []
        self._inbox: deque[Attempted] = deque()
        self._nudge: Callable[[], None] = lambda: None
        self._owned: frozenset[int] = frozenset()
        self._now_ms = 0
        # Deliveries with an attempt whose result is not in the ledger yet.
        self._started: set[str] = set()
        self._notices = Notices(
            self._ledger, self._planner, self._runs, self._queues, self._started
        )
        self._due = DueDeliveries(
            self._ledger,
            self._queues,
            self._notices,
            self._stops,
            self._runs,
            started=self._started,
            report=self._report,
            links=setup.links,
            prices=setup.prices,
        )
        self._digests = Digests(
            setup.digests,
            read_digest,
            knows=self._ledger.knows,
            unreachable=lambda receiver: self._queues.why_not(receiver, 0),
            held=self._planner.closed,
        )
        self._order_unchecked = False
        self._unsaved = False
        self._draining = 0
        self._round = asyncio.Event()

    # -- what the worker calls ---------------------------------------------------------------

    def attached(self, to: Attachment) -> None:
        """Called once, before anything else."""
        self._nudge, self._only, self._due.skip = to.nudge, to.only_runs, to.skip
        self._digests.attached(to)

    def follows(self, partition: int) -> Sequence[Partition]:
        """The runs of an issue partition, silences, and the ledger, where another worker may
        write, too."""
        if self._only is not None:
            runs = {telemetry_partition(run) for run in self._only}
        else:
            runs = set(range(TELEMETRY_PARTITIONS))
        whole = self._planner.needs_all_runs
        mine = sorted(number for number in runs if whole or number % ISSUE_PARTITIONS == partition)
        followed = [Partition(self._topics.runs, number) for number in mine]
        others = (self._topics.actions, self._topics.control)
        return [*followed, *(Partition(topic, partition) for topic in others)]

    def restore(self, partition: int, records: Sequence[Record]) -> None:
        """Records of the topics restored and followed, for input partition `partition`, in
        order."""
        for record in records:
            self._follow(record, restored_in=partition)
        self._stops.may_be_final = True

    def restored(self, partition: int, next_offset: int | None) -> None:
        """All was read; the group's committed offset is `next_offset` (None: nothing yet)."""
        self._planner.open_issues_now.restored(partition, next_offset)

    def release(self, partitions: Collection[int]) -> None:
        """Drop the state of partitions that another worker owns now."""
        self._ledger.drop(partitions)
        self._notices.release()
        self._writer.release()
        if not self._planner.needs_all_runs:
            self._runs.release(partitions)
        self._control.release(frozenset(partitions))
        self._planner.release(frozenset(partitions))

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        """Take the records in, in order per partition, and fire the timers that are due."""
        self._now_ms, self._owned = tick.now_ms, tick.owned
        poison: list[Poison] = []
        while self._inbox:
            self._settle_safely(self._inbox.popleft(), tick.now_ms)
        for record in records:
            if record.partition.topic != self._topics.issues:
                self._follow(record)
                continue
            try:
                self._plan(record, tick.now_ms)
            except RecordError as error:
                poison.append(Poison(record, error))
            except Exception as error:
                logger.exception("issue not understood", extra={"action": "actions"})
                poison.append(Poison(record, MalformedRecord(f"{type(error).__name__} (a bug)")))
        settled = self._stops.settled(tick.now_ms)
        self._writer.change(self._notices.ended(settled, tick.now_ms), tick.now_ms)
        self._supersede_all(tick.now_ms)
        for digest, unsent in self._digests.settled(tick.now_ms, tick.owned):
            decision = None if unsent is None else Decision("suppressed", unsent)
            self._writer.change([(digest, decision)], tick.now_ms)
        self._silences_over += self._control.silences.outdated(tick.now_ms)
        self._writer.remove_outdated(tick.now_ms)
        return poison

    def outputs(self) -> Sequence[Outgoing]:
        """What `apply` has found since the last call, and `snapshots` with `force`: acknowledged by
        the bus before anything else is written."""
        outputs, self._silences_over = [*self._writer.drain(), *self._silences_over], []
        self._unsaved = self._unsaved or bool(outputs)
        return outputs

    def next_due_ms(self) -> int | None:
        """When `apply` must be called even if no record comes (Unix milliseconds); None: never."""
        dues = (self._due.next_ms(), self._digests.next_due_ms())
        return min((due for due in dues if due is not None), default=None)

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint should come now rather than at the end of its interval. Attempts
        start after a checkpoint, so one is wanted when any is due."""
        if self._digests.wanted:
            return True
        due = self._due.next_ms()
        # Another worker's entry may end a delivery without anything to be written here: whoever
        # waits in `drain` must hear of each round.
        return self._draining > 0 or (due is not None and due <= self._now_ms)

    async def checkpointed(self, now_ms: int) -> None:
        """On the event loop, in each checkpoint: what was handed out is on the bus. The ledger is
        on the bus, so what is due may be sent."""
        self._now_ms = now_ms
        await self._due.start(now_ms, self._owned)
        self._digests.start()
        self._metrics.set(names.PENDING, self._ledger.open())
        self._unsaved = False
        self._round.set()

    async def ended(self) -> None:
        """On the event loop, when the worker ends, whatever ended it."""
        await self._digests.close()
        await self._queues.close(self._close_receivers)

    # -- what others call --------------------------------------------------------------------

    async def drain(self, timeout_s: float, run_id: str | None = None) -> bool:
        """Wait until all deliveries (of one run) are final and on the bus; at most `timeout_s`.

        Call it after `Worker.caught_up`. Returns whether they are; `unfinished` returns those that
        are not.
        """
        self._draining += 1
        try:
            async with asyncio.timeout(timeout_s):
                self._nudge()
                while self._inbox or self._unsaved or self._ledger.open(run_id):
                    self._round.clear()
                    await self._round.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._draining -= 1

    def unfinished(self, run_id: str | None = None) -> list[Delivery]:
        """The deliveries (of one run) that are not final, without repeats."""
        return [one for one in self._ledger.pending(run_id) if one.occasion != REPEAT]

    @property
    def public_url(self) -> str | None:
        """Where people reach the pages that links in messages lead to; None: no links."""
        return self._due.links.public_url

    async def use(self, setup: Setup, in_thread: InThread) -> None:
        """Go on with another configuration. What was decided by the old one stays decided."""
        close_old, self._close_receivers = self._close_receivers, setup.close
        # A receiver is there before anything is decided to be sent to it.
        self._queues.add(setup.queues)
        await in_thread(lambda: self._decide_by(setup))
        self._due.links, self._due.prices = setup.links, setup.prices
        self._queues.keep(setup.queues, close_old)

    # -- deciding (worker's thread) ------------------------------------------------------------

    def _decide_by(self, setup: Setup) -> None:
        self._planner.use(setup.decisions)
        self._stops.backends = setup.backends
        self._writer.failures = setup.failures
        self._digests.receivers = setup.digests

    def _plan(self, record: Record, now_ms: int) -> None:
        event = read_event(record)
        if event is None:
            raise MalformedRecord("expected an event, found numbers")
        about = event.data
        if not isinstance(about, Issue | Feedback):
            # Of a later release: nothing to send.
            return
        if self._only is not None and about.run_id not in self._only:
            return
        issue, intents = self._planner.intents(about, event, now_ms)
        self._writer.change(self._planner.withdrawn(issue, self._started), now_ms)
        self._writer.change(self._notices.answered(about, event, now_ms), now_ms)
        for intent in intents:
            self._intend(intent, record.append_ms, now_ms)

    def _intend(self, intent: Intent, append_ms: int, now_ms: int) -> None:
        identity, planned, issue = intent.identity, intent.planned, intent.issue
        why_not = planned.why_not or self._writer.failures.why_not_notified(issue, planned.action)
        age_ms = now_ms - append_ms
        if planned.kind == STOP:
            if why_not is None and planned.asks is None:
                needless = self._stops.needless(issue)
                self._writer.change(self._notices.ended(needless, now_ms), now_ms)
            why_not = why_not or self._stops.why_not(identity, issue, age_ms)
            delivery = intent.stop(self._requested_by, now_ms)
        else:
            why_not = why_not or self._queues.why_not(planned.action, age_ms)
            queue = self._queues.get(planned.action)
            delivery = intent.notice(0 if queue is None else queue.give_up_ms, now_ms)
        if why_not is not None:
            self._writer.decide(delivery, Decision("suppressed", why_not), now_ms)
        else:
            self._writer.appended(identity, append_ms)
            self._writer.change(self._notices.begun(delivery, intent, now_ms), now_ms)
            self._supersede(delivery, now_ms)

    def _supersede(self, delivery: Delivery, now_ms: int) -> None:
        queue = self._queues.get(delivery.action)
        if queue is not None and queue.one_alert:
            self._writer.change(self._notices.superseded(delivery), now_ms)

    def _supersede_all(self, now_ms: int) -> None:
        """What another worker left: it may have ended while an earlier state was under way."""
        if self._order_unchecked:
            self._order_unchecked = False
            for delivery in self._ledger.pending():
                self._supersede(delivery, now_ms)

    def _settle_safely(self, result: Attempted, now_ms: int) -> None:
        """Settle one attempt; a fault of ours in it counts as a failed attempt of it alone."""
        for identity in result.delivery_ids:
            self._started.discard(identity)
            try:
                self._settle(identity, result, now_ms)
            except Exception:
                logger.exception("attempt not settled", extra={"action": "actions"})
                delivery = self._ledger.get(identity)
                if delivery is not None:
                    self._ledger.postpone(delivery, now_ms + _AFTER_A_BUG_MS)

    def _settle(self, identity: str, result: Attempted, now_ms: int) -> None:
        before = self._ledger.get(identity)
        if before is None:
            return
        if result.instead is not None:
            change = (before, result.instead)
            self._writer.change(self._notices.ended([change], now_ms), now_ms)
            self._writer.change(self._notices.continued(before, now_ms, result.instead), now_ms)
            return
        if result.outcome is None:
            gave_up = self._stops.give_up(before, now_ms)
            self._writer.change(self._notices.ended([gave_up], now_ms), now_ms)
            return
        entry, decision = self._stops.answered(before, result.outcome, now_ms)
        delivery = self._ledger.attempted(
            entry,
            result.outcome,
            at_ms=result.at_ms,
            duration_ms=result.duration_ms,
            now_ms=now_ms,
            suspended_until_ms=result.suspended_until_ms,
            decision=decision,
        )
        self._metrics.add(names.ATTEMPTS, kind=delivery.kind)
        if delivery.final:
            self._writer.change(self._notices.stopped(before, now_ms), now_ms)
        self._writer.publish(delivery, now_ms, before)
        if result.works_again:
            self._ledger.recall(delivery.action, now_ms)
        self._supersede(delivery, now_ms)
        if delivery.final:
            self._writer.change(self._notices.continued(before, now_ms), now_ms)
        self._stops.may_be_final |= delivery.kind == STOP

    def _follow(self, record: Record, *, restored_in: int | None = None) -> None:
        """A record of what is followed; an issue, too, if it is `restored_in` a partition."""
        if record.partition.topic == self._topics.control:
            self._control.follow(record)
            return
        if restored_in is None and self._writer.wrote(record):
            return
        if record.value is None:
            self._runs.end(record.key.decode(errors="replace"))
            return
        try:
            event = read_event(record)
        except RecordError as error:
            logger.warning(
                "record skipped", extra={"action": "actions", "reason": clip(str(error), 300)}
            )
            return
        data = None if event is None else event.data
        if isinstance(data, RunView | Delivery | Issue) and (
            self._only is not None and data.run_id not in self._only
        ):
            return
        if event is not None and isinstance(data, RunView):
            self._stops.may_be_final |= self._runs.follow(data, event.time_ms)
            self._planner.open_issues_now.follow(data)
        elif isinstance(data, Issue) and restored_in is not None:
            self._planner.open_issues_now.restore(restored_in, record.offset, data)
        elif isinstance(data, Delivery):
            self._order_unchecked |= self._ledger.read(data)
            if data.final:
                self._writer.drop(data)

    def _report(self, attempted: Attempted) -> None:
        self._inbox.append(attempted)
        self._nudge()
