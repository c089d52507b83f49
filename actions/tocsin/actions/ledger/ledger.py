"""The ledger: the newest state of every delivery, and the schedule of what comes next. Pure.

The actions topic is its copy: an entry counts once it was written there. Entries that are final are
kept as a few words, so that a repeat of their issue does nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Decision, Outcome, RetryPolicy, decide
from tocsin.actions.ledger.final_entries import FinalEntries, Settled
from tocsin.actions.ledger.message_handles import MessageHandles
from tocsin.actions.ledger.notice_history import NoticeHistory
from tocsin.actions.ledger.pending_index import PendingIndex
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import REPEAT, Attempt, Delivery, DeliveryState
from tocsin.schemas.records.events import clip
from tocsin.schemas.topics import issue_partition

Change = tuple[Delivery, Decision | None]
"""An entry as it is to be written, or an entry of the ledger and what is decided about it."""

_LAST_ATTEMPTS: Final = 8


class Ledger:
    """All deliveries of the partitions that are ours."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self._policy = policy or RetryPolicy()
        self._pending: dict[str, Delivery] = {}
        # What is pending about an issue for a receiver; one for each state, so a few.
        self._lines = PendingIndex(lambda one: _line_of(one) if one.kind != STOP else None)
        self._groups = PendingIndex(lambda one: (one.action, one.group) if one.group else None)
        self._repeats = PendingIndex(lambda one: one.issue_id if one.occasion == REPEAT else None)
        self._of_run = PendingIndex(lambda one: one.run_id)
        self._stops_of_run = PendingIndex(lambda one: one.run_id if one.kind == STOP else None)
        self._repeats_of_run = PendingIndex(
            lambda one: one.run_id if one.occasion == REPEAT else None
        )
        self._indexes: Sequence[PendingIndex[Any]] = (
            self._lines,
            self._groups,
            self._repeats,
            self._of_run,
            self._stops_of_run,
            self._repeats_of_run,
        )
        self._held: dict[tuple[str, str], list[str]] = {}
        self._handles = MessageHandles()
        self._stops: dict[tuple[str, str], str] = {}
        self._due: dict[str, list[tuple[int, str]]] = {}
        self._history = NoticeHistory()
        self._settled = FinalEntries(self._history.is_open)

    def open(self, run_id: str | None = None) -> int:
        """How many are not final, of one run or of all, without repeats. From any thread."""
        if run_id is None:
            return len(self._pending) - self._repeats.total
        return self._of_run.count(run_id) - self._repeats_of_run.count(run_id)

    def pending(self, run_id: str | None = None) -> Iterator[Delivery]:
        """The deliveries without a final state, of one run or of all."""
        of_run = self._pending if run_id is None else self._of_run.get(run_id)
        for identity in list(of_run):
            if (delivery := self._pending.get(identity)) is not None:
                yield delivery

    def stops(self, run_id: str) -> list[Delivery]:
        """The stops of one run that are not final."""
        return [self._pending[one] for one in self._stops_of_run.get(run_id)]

    def line(self, issue_id: str, action: str) -> list[Delivery]:
        """The notices about one issue to one receiver that are not final; none of stops."""
        return [self._pending[one] for one in self._lines.get((issue_id, action))]

    def group(self, action: str, group: str) -> list[Delivery]:
        """The notices of a group to one receiver that are not final."""
        return [self._pending[one] for one in self._groups.get((action, group))]

    def message(self, delivery: Delivery) -> list[Delivery]:
        """What is sent in one message with a pending delivery: that first, then the others."""
        if delivery.sent_as is None:
            return [delivery]
        group = self.group(delivery.action, delivery.group)
        others = (one for one in group if one.sent_as == delivery.sent_as)
        return [delivery, *(one for one in others if one.delivery_id != delivery.delivery_id)]

    def repeats(self, issue_id: str) -> list[Delivery]:
        """The repeats of an issue's notices that are not final."""
        return [self._pending[one] for one in self._repeats.get(issue_id)]

    def noticed(self, issue_id: str) -> Mapping[str, Noticed]:
        """The notices about an issue that each receiver has got, by name."""
        return self._history.by_receiver(issue_id)

    def sent_stops(self) -> list[Delivery]:
        """The stops that were sent and are not final."""
        found = (self._pending.get(identity) for identity in self._stops.values())
        return [stop for stop in found if stop is not None and stop.attempts > 0]

    def stop_of(self, run_id: str, incarnation: str) -> Delivery | None:
        """The stop of a training that is not final."""
        return self._pending.get(self._stops.get((run_id, incarnation), ""))

    def stops_since(self, since_ms: int) -> list[tuple[str, str]]:
        """Run and incarnation of the stops that were sent, or are about to be, since then."""
        found: list[tuple[str, str]] = []
        for training, identity in self._stops.items():
            pending = self._pending.get(identity)
            if pending is not None:
                counts = not pending.waits_for_people and pending.updated_ms >= since_ms
            else:
                settled = self._settled.get(identity)
                counts = settled is not None and settled.updated_ms >= since_ms
            if counts:
                found.append(training)
        return found

    def waiting_stops(self, run_id: str = "", incarnation: str = "") -> list[Delivery]:
        """The stops that are not sent before people approve: of one training, or of all."""
        found = (self._pending.get(identity) for identity in self._stops.values())
        return [
            stop
            for stop in found
            if stop is not None
            and stop.waits_for_people
            and (not run_id or (stop.run_id, stop.incarnation) == (run_id, incarnation))
        ]

    def get(self, delivery_id: str) -> Delivery | None:
        """A delivery that is not final."""
        return self._pending.get(delivery_id)

    def knows(self, delivery_id: str) -> bool:
        """Whether there is an entry."""
        return delivery_id in self._pending or delivery_id in self._settled

    def stop_for(self, notice: Delivery) -> tuple[DeliveryState, str, bool] | None:
        """State and reason of the stop for a notice's issue, and whether it waits for people; None
        if there is none."""
        for state in ("firing", "ongoing"):
            identity = delivery_id(notice.issue_id, STOP, state, notice.issue_times)
            found = self._pending.get(identity) or self._settled.get(identity)
            if found is not None:
                waits = isinstance(found, Delivery) and found.waits_for_people
                return found.state, found.reason, waits
        return None

    def other_stop(self, run_id: str, incarnation: str, delivery_id: str) -> str | None:
        """Why an incarnation needs no stop: it got one for another issue. None if it did not."""
        other = self._stops.get((run_id, incarnation))
        if other is None or other == delivery_id:
            return None
        pending = self._pending.get(other)
        if pending is not None and pending.waits_for_people:
            return "people are asked already whether to stop the run, for another issue"
        if pending is not None:
            return "the run is being stopped already, for another issue"
        return "the run was stopped already, for another issue"

    def read(self, delivery: Delivery) -> bool:
        """Take an entry of the topic in, unless ours is as new. Returns whether it was newer."""
        mine = self._pending.get(delivery.delivery_id)
        if mine is not None and delivery.rank <= mine.rank:
            return False
        settled = self._settled.get(delivery.delivery_id)
        if settled is not None and delivery.rank <= (
            settled.redrives, True, settled.attempts, settled.updated_ms,
        ):  # fmt: skip
            return False
        self._put(delivery)
        return True

    def write(self, delivery: Delivery) -> Delivery:
        """A new entry, or a new state of one. Returns it: it is to be written to the topic."""
        self._put(delivery)
        return delivery

    def attempted(
        self,
        old: Delivery,
        outcome: Outcome,
        *,
        at_ms: int,
        duration_ms: int,
        now_ms: int,
        suspended_until_ms: int | None = None,
        decision: Decision | None = None,
    ) -> Delivery:
        """The entry after an attempt; `decision` is what it means, if that was decided already."""
        attempts = old.attempts + 1
        decision = decision or decide(
            outcome,
            # So all that is in one message is tried again at one time.
            delivery_id=old.message_id,
            attempts=attempts,
            now_ms=now_ms,
            give_up_ms=old.give_up_ms,
            policy=self._policy,
        )
        attempt = Attempt(
            at_ms=at_ms,
            result=clip(outcome.text(), 300),
            retry=decision.retry and not outcome.sent,
            duration_ms=max(0, duration_ms),
        )
        last = (*old.last_attempts, attempt)[-_LAST_ATTEMPTS:]
        old = old.model_copy(
            update={
                "attempts": attempts,
                "last_attempts": last,
                "suspended_until_ms": suspended_until_ms,
                "handle": outcome.handle or old.handle,
            }
        )
        return self.decided(old, decision, now_ms)

    def decided(self, delivery: Delivery, decision: Decision, now_ms: int) -> Delivery:
        """The entry in its new state. What is final needs its event no more."""
        changes: dict[str, object] = {
            "state": decision.state,
            "reason": clip(decision.reason),
            "updated_ms": max(now_ms, delivery.updated_ms),
            "next_attempt_ms": decision.next_attempt_ms,
        }
        if decision.state != "pending":
            changes |= {"event": None, "issue_event": None, "next_attempt_ms": None}
        return self.write(delivery.model_copy(update=changes))

    def actions(self) -> list[str]:
        """Which receivers (and `stop`) something is pending for."""
        return list(self._due)

    def due(self, action: str, now_ms: int, busy: Collection[str], room: int) -> list[Delivery]:
        """At most `room` deliveries of one receiver that are due and not `busy`, oldest first.

        They leave the schedule until their next state is written.
        """
        heap = self._due.get(action, [])
        found: dict[str, Delivery] = {}
        while heap and heap[0][0] <= now_ms and len(found) < room:
            delivery = self._scheduled(*heapq.heappop(heap))
            if delivery is not None and delivery.delivery_id not in busy:
                found[delivery.delivery_id] = delivery
        if not heap:
            self._due.pop(action, None)
        return list(found.values())

    def postpone(self, delivery: Delivery, until_ms: int) -> None:
        """Put one that `due` returned back, without a new state: its time is not ours to decide."""
        heapq.heappush(self._due.setdefault(delivery.action, []), (until_ms, delivery.delivery_id))

    def recall(self, action: str, now_ms: int) -> None:
        """Put what waits past its time for this receiver back in its place, the oldest first: it
        works again."""
        for one in self._pending.values():
            due_ms = one.next_attempt_ms
            if one.action == action and due_ms is not None and due_ms < now_ms:
                self.postpone(one, due_ms)

    def hold(self, delivery: Delivery, behind: Delivery) -> None:
        """Put one that `due` returned back when another one of the line of `behind` has a new
        state; that is what it waits for, or is sent together with what does.
        """
        self._held.setdefault(_line_of(behind), []).append(delivery.delivery_id)

    def next_due_ms(self, full: Collection[str] = ()) -> int | None:
        """When the next attempt is due, of receivers that are not `full`."""
        first: int | None = None
        for action, heap in self._due.items():
            while heap and self._scheduled(*heap[0]) is None:
                heapq.heappop(heap)
            if heap and action not in full:
                first = heap[0][0] if first is None else min(first, heap[0][0])
        return first

    def outdated(self, now_ms: int) -> list[Settled]:
        """Final entries that have been kept for long enough, or are too many: they leave the
        ledger, the oldest first. Stops leave by their age alone.
        """
        gone: list[Settled] = []
        for identity, settled in self._settled.outdated(now_ms):
            self._history.drop(settled.issue_id)
            gone.append(settled)
            incarnation = (settled.run_id, settled.incarnation)
            if settled.stop and self._stops.get(incarnation) == identity:
                del self._stops[incarnation]
        return gone

    def drop(self, partitions: Collection[int]) -> None:
        """Drop the runs of these partitions of the issues topic."""
        wanted = frozenset(partitions)
        runs: dict[str, bool] = {}

        def gone(run_id: str) -> bool:
            if run_id not in runs:
                runs[run_id] = issue_partition(run_id) in wanted
            return runs[run_id]

        for delivery in [d for d in self._pending.values() if gone(d.run_id)]:
            self._history.drop(delivery.issue_id)
        self._pending = {k: d for k, d in self._pending.items() if not gone(d.run_id)}
        for index in self._indexes:
            index.keep(self._pending)
        held = ((line, [i for i in ids if i in self._pending]) for line, ids in self._held.items())
        self._held = {line: ids for line, ids in held if ids}
        for settled in self._settled.keep(lambda one: not gone(one.run_id)):
            self._history.drop(settled.issue_id)
        self._handles.drop(gone)
        self._stops = {k: d for k, d in self._stops.items() if not gone(k[0])}

    def handle(self, delivery: Delivery) -> str | None:
        """What its receiver calls the message about an earlier state of its issue."""
        return self._handles.get(delivery)

    def _put(self, delivery: Delivery) -> None:
        self._handles.learn(delivery)
        identity, is_stop = delivery.delivery_id, delivery.kind == STOP
        incarnation = (delivery.run_id, delivery.incarnation)
        if delivery.state in ("pending", "delivered") and is_stop:
            self._stops[incarnation] = identity
        elif is_stop and self._stops.get(incarnation) == identity:
            del self._stops[incarnation]
        if not is_stop:
            self._history.apply(delivery)
        if delivery.final:
            if self._pending.pop(identity, None) is not None:
                for index in self._indexes:
                    index.remove(delivery)
            settled = Settled(
                delivery.key,
                delivery.run_id,
                delivery.incarnation,
                delivery.state,
                delivery.updated_ms,
                delivery.attempts,
                is_stop,
                delivery.redrives,
                delivery.reason if is_stop else "",
            )
            self._settled.add(identity, settled)
        else:
            self._settled.remove(identity)
            if identity not in self._pending:
                for index in self._indexes:
                    index.add(delivery)
            self._pending[identity] = delivery
            if delivery.next_attempt_ms is not None:
                self.postpone(delivery, delivery.next_attempt_ms)
        for one in self._held.pop(_line_of(delivery), ()):
            held = self._pending.get(one)
            if held is not None and held.next_attempt_ms is not None:
                self.postpone(held, held.next_attempt_ms)

    def _scheduled(self, due_ms: int, delivery_id: str) -> Delivery | None:
        """The delivery of a place in the schedule, if the place still counts."""
        delivery = self._pending.get(delivery_id)
        if delivery is None or delivery.next_attempt_ms is None:
            return None
        return delivery if due_ms >= delivery.next_attempt_ms else None


def _line_of(delivery: Delivery) -> tuple[str, str]:
    return delivery.issue_id, delivery.action
