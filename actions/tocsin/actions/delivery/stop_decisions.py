"""What becomes of stops over time, by what runs and people say. The ledger's entries decide."""

from __future__ import annotations

from collections.abc import Iterator

from tocsin.actions.decision.planned import STOP
from tocsin.actions.delivery.control_records import ControlRecords
from tocsin.actions.delivery.followed_runs import FollowedRuns
from tocsin.actions.delivery.ledger import Change, Ledger
from tocsin.actions.delivery.retry import Decision
from tocsin.actions.delivery.stop import decide_stop, why_no_stop, why_over
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Issue

NEEDS_NOBODY = "another issue stops the run, which nobody needs to approve"


class StopDecisions:
    """Decides; whoever asks writes the decisions into the ledger.

    Attributes:
        may_be_final: whether something is known since the last call of `settled`.
    """

    def __init__(self, ledger: Ledger, runs: FollowedRuns, control: ControlRecords) -> None:
        self.may_be_final = False
        self._ledger = ledger
        self._runs = runs
        self._control = control

    def why_not(self, identity: str, issue: Issue, age_ms: int) -> str | None:
        """Why a run is not stopped for an issue of that age; None if it is to be."""
        if other := self._ledger.other_stop(issue.run_id, issue.incarnation, identity):
            return other
        run = self._runs.of_issue(issue)
        return why_no_stop(run, issue.incarnation, delivery_id=identity, age_ms=age_ms)

    def settled(self, now_ms: int) -> Iterator[Change]:
        """What becomes of stops by what runs say now, by people's answers, or since none came."""
        yield from self._by_runs(now_ms)
        yield from self._control.approvals.settle(self._ledger, now_ms)

    def needless(self, issue: Issue) -> Iterator[Change]:
        """The questions about a training that is stopped without one."""
        for stop in self._ledger.waiting_stops(issue.run_id, issue.incarnation):
            yield stop, Decision("suppressed", NEEDS_NOBODY)

    def switched_off(self, delivery: Delivery) -> Decision | None:
        """What becomes of a stop while all stops are switched off; None for all else."""
        off = self._control.switch.off
        return Decision("suppressed", off) if off and delivery.kind == STOP else None

    def gave_up(self, stop: Delivery, now_ms: int) -> Decision:
        """What becomes of a stop whose time is up, or after which the run has ended."""
        decision = self._by_run(stop, now_ms) if stop.attempts > 0 else None
        if decision is not None:
            return decision
        if now_ms >= stop.give_up_ms or stop.attempts == 0:
            why = "no answer from the run" + (", and never sent" if stop.attempts == 0 else "")
            return Decision("expired", why)
        return Decision("pending", stop.reason, stop.give_up_ms)

    def _by_runs(self, now_ms: int) -> Iterator[Change]:
        if not self.may_be_final:
            return
        self.may_be_final = False
        for stop in self._ledger.sent_stops():
            if (decision := self._by_run(stop, now_ms)) is not None:
                yield stop, decision
        for stop in self._ledger.waiting_stops():
            run = self._runs.get(stop.run_id)
            if run is not None and (over := why_over(run, stop.incarnation)) is not None:
                yield stop, Decision("suppressed", over)

    def _by_run(self, stop: Delivery, now_ms: int) -> Decision | None:
        return decide_stop(self._runs.get(stop.run_id), stop, now_ms)
