"""What becomes of stops over time, by the records of runs and people. The ledger decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Decision, Outcome
from tocsin.actions.delivery.control_records import ControlRecords
from tocsin.actions.delivery.followed_runs import FollowedRuns
from tocsin.actions.delivery.stop_command import decide_stop, sent_no_more, why_no_stop, why_over
from tocsin.actions.ledger.ledger import Change, Ledger
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.runs_fold import RunSeen

NEEDS_NOBODY = "another issue stops the run, which nobody needs to approve"


class Backends(Protocol):
    """What may end a job whose launcher has not ended it: decides, and asks nobody itself."""

    def turn(self, stop: Delivery, run: RunSeen, now_ms: int) -> Change | None:
        """What is new about a stop that was sent, and that the run has not answered; None: nothing.

        Its entry names a backend from then on, if it is the turn of one.
        """
        ...

    def answered(self, stop: Delivery, outcome: Outcome, now_ms: int) -> tuple[Delivery, Decision]:
        """What an attempt at the backend means for the stop: its entry, and its new state."""
        ...


class FollowedStops:
    """Decides; whoever asks writes the decisions into the ledger.

    Attributes:
        backends: None where no backend may be asked.
        may_be_final: whether something is known since the last call of `settled`.
    """

    def __init__(
        self,
        ledger: Ledger,
        runs: FollowedRuns,
        control: ControlRecords,
        backends: Backends | None = None,
    ) -> None:
        self.backends = backends
        self.may_be_final = False
        self._ledger = ledger
        self._runs = runs
        self._control = control

    def why_not(self, identity: str, issue: Issue, age_ms: int) -> str | None:
        """Why a run is not stopped for an issue of that age; None if it is to be."""
        if other := self._ledger.other_stop(issue.run_id, issue.incarnation, identity):
            return other
        run = self._runs.run_of(issue)
        return why_no_stop(run, issue.incarnation, delivery_id=identity, age_ms=age_ms)

    def settled(self, now_ms: int) -> Iterator[Change]:
        """What becomes of stops by the views of runs, by people's answers, or since none came."""
        yield from self._by_runs(now_ms)
        yield from self._control.approvals.settle(self._ledger, now_ms)

    def needless(self, issue: Issue) -> Iterator[Change]:
        """The questions about a training that is stopped without one."""
        for stop in self._ledger.waiting_stops(issue.run_id, issue.incarnation):
            yield stop, Decision("suppressed", NEEDS_NOBODY)

    def switched_off(self, delivery: Delivery) -> Decision | None:
        """What becomes of a stop while all stops are switched off; None for all else."""
        off = self._control.switch.off
        if not off or delivery.kind != STOP:
            return None
        asked = delivery.backend is not None and delivery.backend.asked_ms is not None
        # What a backend has accepted cannot be taken back; it is looked at until the job is gone.
        return None if asked else Decision("suppressed", off)

    def is_to_check(self, stop: Delivery, now_ms: int) -> bool:
        """Whether a stop that is due needs no attempt, but a look at what became of it."""
        if stop.backend is None:
            return sent_no_more(stop, now_ms)
        run = self._runs.get(stop.run_id)
        return run is not None and why_over(run, stop.incarnation) is not None

    def give_up(self, stop: Delivery, now_ms: int) -> Change:
        """What becomes of a stop whose time is up, or after which the run has ended."""
        change = self._changed(stop, now_ms) if stop.attempts > 0 else None
        if change is not None:
            return change
        if now_ms >= stop.give_up_ms or stop.attempts == 0:
            why = "no answer from the run" + (", and never sent" if stop.attempts == 0 else "")
            return stop, Decision("expired", why)
        return stop, Decision("pending", stop.reason, stop.give_up_ms)

    def answered(
        self, delivery: Delivery, outcome: Outcome, now_ms: int
    ) -> tuple[Delivery, Decision | None]:
        """What a backend's answer means for a stop; of other attempts that is decided elsewhere."""
        if delivery.backend is None or self.backends is None:
            return delivery, None
        return self.backends.answered(delivery, outcome, now_ms)

    def _by_runs(self, now_ms: int) -> Iterator[Change]:
        if not self.may_be_final:
            return
        self.may_be_final = False
        for stop in self._ledger.sent_stops():
            if (change := self._changed(stop, now_ms)) is not None:
                yield change
        for stop in self._ledger.waiting_stops():
            run = self._runs.get(stop.run_id)
            if run is not None and (over := why_over(run, stop.incarnation)) is not None:
                yield stop, Decision("suppressed", over)

    def _changed(self, stop: Delivery, now_ms: int) -> Change | None:
        run = self._runs.get(stop.run_id)
        if (decision := decide_stop(run, stop, now_ms)) is not None:
            return stop, decision
        if run is None or self.backends is None:
            return None
        return self.backends.turn(stop, run, now_ms)
