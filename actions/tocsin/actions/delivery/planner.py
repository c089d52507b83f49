"""From a record of the issues topic to what is to be done about it, by what is known here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.decide import Decisions, Known
from tocsin.actions.decision.inhibitions import OpenIssue
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.actions.decision.open_issues import OpenIssues
from tocsin.actions.decision.planned import STOP, Held, Planned
from tocsin.actions.decision.retry import Decision
from tocsin.actions.decision.silences import Silence
from tocsin.actions.decision.stop_guards import HOUR_MS, Fleet
from tocsin.actions.delivery.approvals import pending_approval
from tocsin.actions.delivery.control_records import ControlRecords
from tocsin.actions.delivery.feedback import issue_after, planned_after
from tocsin.actions.delivery.followed_runs import FollowedRuns
from tocsin.actions.delivery.records import issue_of, new_delivery, unpublished_event
from tocsin.actions.delivery.stop_command import give_up_ms, stop_command
from tocsin.actions.ledger.ledger import Ledger
from tocsin.schemas.configuration.sections import StopOptions
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import STARTS, Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue


@dataclass(frozen=True, slots=True)
class Intent:
    """One thing to do about an issue, with the id of its delivery; `event` is what is sent."""

    identity: str
    planned: Planned
    issue: Issue
    event: Event[Data]

    def notice(self, lasts_ms: int, now_ms: int) -> Delivery:
        """The entry of a notice that is given up after that time."""
        return self._entry(self.event, now_ms + lasts_ms, now_ms)

    def stop(self, requested_by: str, now_ms: int) -> Delivery:
        """The entry of a stop, with its command; it may wait for people."""
        planned, options = self.planned, self.planned.options or StopOptions()
        command = stop_command(
            self.issue, self.identity, options, requested_by=requested_by, now_ms=now_ms
        )
        stop = self._entry(command, give_up_ms(options, now_ms), now_ms)
        stop = stop.model_copy(update={"issue_event": from_json(self.event.encode())})
        if planned.asks is None:
            return stop
        return pending_approval(stop, options.approve, planned.asks, now_ms)

    def _entry(self, event: Event[Any], give_up_ms: int, now_ms: int) -> Delivery:
        return new_delivery(
            self.identity,
            self.issue,
            self.planned,
            event.encode(),
            now_ms=now_ms,
            give_up_ms=give_up_ms,
        )


class Planner(Known):
    """Asks the decisions, and remembers what they need: who was notified, which issues are open.

    Attributes:
        needs_all_runs: whether limits of stops count all runs of the bus. Those that a later
            configuration adds count the runs that are followed.

    Args:
        acknowledges: whether a receiver can show that a person takes care of an issue.
        control: what people have decided.
        runs: the runs that are followed.
    """

    def __init__(
        self,
        decisions: Decisions,
        ledger: Ledger,
        acknowledges: Callable[[str], bool],
        control: ControlRecords,
        runs: FollowedRuns,
    ) -> None:
        self.open_issues_now = OpenIssues(decisions.inhibit)
        self.needs_all_runs: Final = decisions.guards.counts_runs
        self._decisions = decisions
        self._ledger = ledger
        self._shows = acknowledges
        self._control = control
        self._runs = runs

    def use(self, decisions: Decisions) -> None:
        """Decide by another configuration. Of its inhibitions it knows the issues that come."""
        self._decisions = decisions
        self.open_issues_now.use(decisions.inhibit)

    @property
    def needs_issues(self) -> bool:
        """Whether the open issues must be known from before this process."""
        return bool(self._decisions.inhibit)

    def intents(
        self, about: Issue | Feedback, event: Event[Data], now_ms: int
    ) -> tuple[Issue, list[Intent]]:
        """What to do about a state of an issue or a person's answer, that is not in the ledger.

        And the issue as it is then.
        """
        issue = issue_after(about) if isinstance(about, Feedback) else about
        self.open_issues_now.note(issue)
        if isinstance(about, Feedback):
            event = unpublished_event(issue, about.at_ms) if about.closes else event
            plan = planned_after(about, self.noticed(issue.issue_id), self._decisions, self._shows)
        else:
            plan = self._decisions.decide(issue, self, now_ms)
        return issue, list(self._new(plan, issue, event))

    def withdrawn(
        self, issue: Issue, started: Collection[str]
    ) -> Iterator[tuple[Delivery, Decision]]:
        """What of the ledger is not to be sent any more, after a state of an issue.

        An issue that was read late may be over: what has recovered is not stopped. And a notice may
        wait about an issue that this one explains.
        """
        explains = self.open_issues_now.explains(issue)
        if not explains and issue.state != "resolved":
            return
        pending = self._ledger.pending if explains else self._ledger.stops
        for delivery in list(pending(issue.run_id)):
            if delivery.attempts or delivery.delivery_id in started:
                continue
            if delivery.kind == STOP:
                # Its condition may have come back since the stop was decided: `times` is higher.
                of_it = delivery.issue_id == issue.issue_id and delivery.issue_times <= issue.times
                if issue.state == "resolved" and of_it:
                    why = "the issue was resolved before the stop was sent"
                    yield delivery, Decision("suppressed", why)
            elif explains and delivery.occasion in STARTS and delivery.issue_state != "resolved":
                held = self._decisions.inhibited(issue_of(delivery), self)
                if held is None:
                    continue
                # A notice that was not sent is not repeated either. Repeats of what was sent are
                # asked about when they are due.
                repeats = self._ledger.repeats(delivery.issue_id)
                repeats = [one for one in repeats if one.action == delivery.action]
                for one in (delivery, *repeats):
                    yield (
                        one.model_copy(update={"held": held.by}),
                        Decision("suppressed", held.reason),
                    )

    def release(self, partitions: frozenset[int]) -> None:
        """Drop the runs of these partitions."""
        self.open_issues_now.release(partitions)

    def times_of(self, intent: Intent) -> NoticeTimes:
        """When a notice is sent, and with which others.

        By its route; the end of an issue by that which notifies of such an issue.
        """
        times, planned = self._decisions.times, intent.planned
        if planned.route is None and intent.issue.state == "resolved":
            planned = self._as_asked(planned, intent.issue)
        return times.for_route(planned.route)

    def closed(self, receiver: str, now_ms: int) -> Held | None:
        """Which time window of its own keeps a receiver from getting a notice now."""
        return self._decisions.closed(Planned(receiver, "", ""), now_ms)

    def held(self, delivery: Delivery, now_ms: int) -> Held | None:
        """What keeps a notice that is due later from being sent then."""
        issue = issue_of(delivery)
        planned = Planned(delivery.action, delivery.kind, delivery.decided_by)
        return self._decisions.held(self._as_asked(planned, issue), issue, self, now_ms)

    def silences(self) -> Iterable[Silence]:
        """The silences of `tocsin silence`."""
        return self._control.silences

    def open_issues(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        """The open issues of one training; that in question may be among them."""
        return self.open_issues_now.in_training(run_id, incarnation)

    def stops_off(self) -> str:
        """Why all stops are switched off; empty if they are not."""
        return self._control.switch.off

    def fleet(self, issue: Issue, now_ms: int) -> Fleet:
        """What limits of stops count, for the run of an issue."""
        return self._runs.fleet(issue.run_id, self._ledger.stops_since(now_ms - HOUR_MS), now_ms)

    def noticed(self, issue_id: str) -> Mapping[str, Noticed]:
        """The notices about an issue that each receiver has got, by name."""
        return self._ledger.noticed(issue_id)

    def _as_asked(self, planned: Planned, issue: Issue) -> Planned:
        """How the configuration notifies a receiver now, with the route that does."""
        notices = self._decisions.routing.notices(issue)
        return next((one for one in notices if one.action == planned.action), planned)

    def _new(self, plan: Iterable[Planned], issue: Issue, event: Event[Data]) -> Iterator[Intent]:
        for planned in plan:
            state = planned.occasion or issue.state
            identity = delivery_id(issue.issue_id, planned.action, state, issue.times)
            if not self._ledger.knows(identity):
                yield Intent(identity, planned, issue, event)
