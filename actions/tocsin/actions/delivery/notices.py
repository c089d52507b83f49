"""The notices of an issue in the ledger: in which message, and with which repeats. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from tocsin.actions.decision.planned import STOP, Planned
from tocsin.actions.decision.retry import Decision
from tocsin.actions.delivery.followed_runs import FollowedRuns
from tocsin.actions.delivery.grouping import next_repeat, placed
from tocsin.actions.delivery.order import SUPERSEDED, superseded, waits
from tocsin.actions.delivery.planner import Intent, Planner
from tocsin.actions.delivery.receiver_queues import ReceiverQueues
from tocsin.actions.delivery.records import new_delivery
from tocsin.actions.ledger.ledger import Change, Ledger
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import (
    FINAL_STATES,
    REPEAT,
    STARTS,
    STOPPED,
    Delivery,
)
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue, IssueOngoing, IssueResolved
from tocsin.schemas.topics import issue_partition

_MAX_BEGUN: Final = 10_000

_ENDED: Final = Decision("suppressed", "the run has ended")
_NOTHING_TO_EDIT: Final = Decision("suppressed", "there is no message that can be edited")


class Notices:
    """Decides on entries of a ledger; whoever has it writes them.

    Args:
        started: the deliveries that are under way.
    """

    def __init__(
        self,
        ledger: Ledger,
        planner: Planner,
        runs: FollowedRuns,
        queues: ReceiverQueues,
        started: Collection[str],
    ) -> None:
        self._ledger = ledger
        self._planner = planner
        self._runs = runs
        self._queues = queues
        self._started = started
        # A message is joined only here, where it was begun, and by runs of one partition: what
        # another worker has, or gets, it may send without what has joined here meanwhile.
        self._begun: dict[str, None] = {}

    def release(self) -> None:
        """Partitions go to another worker: nothing joins the messages that were begun."""
        self._begun.clear()

    def begun(self, entry: Delivery, intent: Intent, now_ms: int) -> Iterator[Change]:
        """A new notice, in its message, and its first repeat; the repeats before it end.

        To be written one by one: what comes later depends on it.
        """
        times, issue = self._planner.times_of(intent), intent.issue
        queue = self._queues.get(entry.action)
        wait_ms = times.wait_ms if queue is not None and queue.groups else 0
        group = times.group(issue) if wait_ms else ""
        repeated = entry.occasion in STARTS
        if repeated:
            repeats = times.repeats(entry.action, issue, now_ms, wait_ms)
            entry = entry.model_copy(update={"repeats": repeats})
            yield from self._withdrawn(issue, "a newer notice is sent", entry.action)
        first = self._placed(entry, group, wait_ms, now_ms)
        yield first, None
        if repeated and (repeat := next_repeat(first, now_ms, self._ledger.knows)) is not None:
            yield self._placed(repeat, group, wait_ms, now_ms), None

    def continued(
        self, before: Delivery, now_ms: int, instead: Decision | None = None
    ) -> Iterator[Change]:
        """The next repeat after one that was made, or that was held (`instead`).

        `before` is its entry while it was pending.
        """
        if before.occasion != REPEAT or instead is _ENDED:
            return
        if (repeat := next_repeat(before, now_ms, self._ledger.knows)) is not None:
            wait_ms = before.repeats.wait_ms if before.repeats is not None else 0
            yield self._placed(repeat, before.group, wait_ms, now_ms), None

    def answered(
        self, about: Issue | Feedback, event: Event[Data], now_ms: int
    ) -> Iterator[Change]:
        """What a state of an issue, or an answer to it, makes of the repeats of its notices, and of
        what its stop knows of it."""
        issue = about.issue if isinstance(about, Feedback) else about
        stop = self._ledger.stop_of(issue.run_id, issue.incarnation)
        if isinstance(about, Issue) and stop is not None and stop.issue_id == issue.issue_id:
            newest = json.loads(event.encode())
            if newest != stop.issue_event:
                # Of two states with as many attempts, the one that was written later counts.
                changes = {"issue_event": newest, "updated_ms": max(now_ms, stop.updated_ms)}
                yield stop.model_copy(update=changes), None
        if isinstance(about, Feedback):
            yield from self._withdrawn(issue, about.text)
        elif isinstance(about, IssueResolved):
            yield from self._withdrawn(issue, "the issue is resolved")
        elif isinstance(about, IssueOngoing):
            newest = json.loads(event.encode())
            for repeat in self._ledger.repeats(issue.issue_id):
                if repeat.delivery_id not in self._started:
                    changes = {"event": newest, "updated_ms": max(now_ms, repeat.updated_ms)}
                    yield repeat.model_copy(update=changes), None

    def ended(self, changes: Iterable[Change], now_ms: int) -> Iterator[Change]:
        """Changes of stops, each end of one with what it makes of messages before it."""
        for stop, decision in changes:
            if decision is not None and decision.state in FINAL_STATES:
                yield from self.stopped(stop, now_ms)
            yield stop, decision

    def stopped(self, stop: Delivery, now_ms: int) -> Iterator[Change]:
        """The notices that edit into messages how a stop has ended.

        To be written before the end of the stop, which is their only cause. There are none for a
        stop of which nobody was notified, nor for one of an earlier time of its issue.
        """
        if stop.kind != STOP or stop.issue_event is None:
            return
        event = EVENT_TYPES.decode(json.dumps(stop.issue_event).encode())
        issue = event.data
        if not isinstance(issue, Issue) or issue.times != stop.issue_times:
            return
        for action, noticed in self._ledger.noticed(issue.issue_id).items():
            queue = self._queues.get(action)
            identity = delivery_id(issue.issue_id, action, STOPPED, issue.times)
            if (
                not noticed.notified
                or queue is None
                or not queue.edits
                or self._ledger.knows(identity)
            ):
                continue
            planned = Planned(action, noticed.kind, noticed.decided_by, occasion=STOPPED)
            give_up_ms = now_ms + queue.give_up_ms
            yield (
                new_delivery(
                    identity, issue, planned, event.encode(), now_ms=now_ms, give_up_ms=give_up_ms
                ),
                None,
            )

    def superseded(self, delivery: Delivery) -> Iterator[Change]:
        """What the newest state of an issue makes wrong, where an issue is one alert."""
        line = self._ledger.line(delivery.issue_id, delivery.action)
        if len(line) > 1:
            for old in superseded(line, self._started):
                yield old, Decision("suppressed", SUPERSEDED)

    def instead(self, delivery: Delivery, now_ms: int) -> Decision | None:
        """What becomes of a notice that is due without an attempt; None: send it."""
        if delivery.occasion == STOPPED:
            return _NOTHING_TO_EDIT if self._ledger.handle(delivery) is None else None
        if delivery.occasion != REPEAT:
            return None
        if self._runs.has_ended(delivery.run_id, delivery.incarnation):
            return _ENDED
        held = self._planner.held(delivery, now_ms)
        return None if held is None else Decision("suppressed", held.reason)

    def message(self, delivery: Delivery, now_ms: int) -> list[Delivery]:
        """What is sent now in one message with a delivery: that first.

        Not a repeat of which something else becomes: each is asked about when its turn comes.
        """
        delivery, *others = self._ledger.message(delivery)
        return [delivery, *(one for one in others if self.instead(one, now_ms) is None)]

    def waits_for(self, delivery: Delivery) -> Delivery | None:
        """Which of a message is not to be sent yet: the notice before it is not under way."""
        together = self._ledger.message(delivery)
        ids = {one.delivery_id for one in together}
        for one in together:
            line = self._ledger.line(one.issue_id, one.action)
            before = [other for other in line if other.delivery_id not in ids]
            repeats = one.occasion == REPEAT and bool(before)
            if repeats or waits(one, before, self._started):
                return one
        return None

    def _withdrawn(self, issue: Issue, why: str, action: str | None = None) -> Iterator[Change]:
        for repeat in self._ledger.repeats(issue.issue_id):
            # An answer to an earlier time of the issue is none to this one.
            if repeat.issue_times > issue.times or action not in (None, repeat.action):
                continue
            if repeat.delivery_id in self._started:
                yield repeat.model_copy(update={"repeats": None}), None
            else:
                yield repeat, Decision("suppressed", why)

    def _placed(self, entry: Delivery, group: str, wait_ms: int, now_ms: int) -> Delivery:
        if not group:
            return entry
        number = issue_partition(entry.run_id)
        others = [
            one
            for one in self._ledger.group(entry.action, group)
            if one.sent_as in self._begun and issue_partition(one.run_id) == number
        ]
        line = self._ledger.line(entry.issue_id, entry.action)
        if entry.occasion != REPEAT and any(one.attempts == 0 for one in line):
            # It waits for an earlier notice. Nothing that has a message already may wait for it:
            # two messages could wait for each other.
            others = []
        found = placed(entry, group, others, wait_ms=wait_ms, now_ms=now_ms)
        self._begun[found.message_id] = None
        if len(self._begun) > _MAX_BEGUN:
            del self._begun[next(iter(self._begun))]
        return found
