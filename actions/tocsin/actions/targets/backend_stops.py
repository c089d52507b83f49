"""The last stage of a stop: a backend ends the job whose launcher has not ended it. Pure.

It is the turn of a backend when the launcher's own ladder (exit point, SIGTERM, SIGKILL) is over
without an end, or at once when the run is lost: its launcher is gone. The entry of the stop in the
ledger names the target and the job from then on, so whoever comes next goes on with the same job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tocsin.actions.decision.retry import (
    Decision,
    Outcome,
    RetryPolicy,
    backoff_ms,
    retry_after_ms,
)
from tocsin.actions.decision.stop_policy import StopPolicy
from tocsin.actions.delivery.stop_command import command_of, sent_ms, was_sent
from tocsin.actions.ledger.ledger import Change
from tocsin.schemas.records.deliveries import BackendStop, Delivery
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunSeen

SLACK_MS: Final = 20_000
"""What a launcher may need beside the graces of its ladder, until its answers are read."""

DEFAULT_CONFIRM_MS: Final = 300_000
"""For a target that the configuration does not name any more."""

POLLING: Final = RetryPolicy(first_ms=1_000, most_ms=15_000, least_ms=500)
"""How often the backend is looked at until the job is gone."""


@dataclass(frozen=True, slots=True)
class BackendStops:
    """Ends jobs whose launcher has not ended them, through the targets of the policy.

    Attributes:
        policy: which target may end which job.
        confirm_ms: by target, how long to look for the end.
    """

    policy: StopPolicy
    confirm_ms: Mapping[str, int]
    polling: RetryPolicy = POLLING

    def turn(self, stop: Delivery, run: RunSeen, now_ms: int) -> Change | None:
        """What is new about a stop that was sent, and that the run has not answered; None:
        nothing."""
        view = run.views.get(stop.incarnation)
        if view is None or view.scheduler is None or run.incarnation != stop.incarnation:
            return None
        if stop.backend is not None or not was_sent(stop):
            return None
        lost = view.state == "lost"
        due_ms = now_ms if lost else min(ladder_end_ms(stop, view), stop.give_up_ms)
        if now_ms < due_ms:
            waits = stop.next_attempt_ms is not None and now_ms < stop.next_attempt_ms <= due_ms
            return None if waits else (stop, Decision("pending", stop.reason, due_ms))
        permit = self.policy.permit(view, view.scheduler)
        if permit.target is None:
            why = f"no answer from the run, and no backend is asked: {permit.why}"
            if now_ms >= stop.give_up_ms:
                return stop, Decision("expired", why)
            noted = stop.reason == clip(why)
            return None if noted else (stop, Decision("pending", why, stop.give_up_ms))
        backend = BackendStop(
            target=permit.target,
            job=view.scheduler,
            started_ms=view.started_ms,
            permitted_by=clip(permit.why, 300),
            begun_ms=now_ms,
        )
        first = "the run is lost" if lost else "the launcher did not end the job in time"
        changes = {
            "backend": backend,
            "reason": clip(f"{first}: {permit.target} is to end it ({permit.why})"),
            "updated_ms": max(now_ms, stop.updated_ms),
            "next_attempt_ms": now_ms,
            "give_up_ms": now_ms + self._confirm_ms(permit.target),
        }
        return stop.model_copy(update=changes), None

    def answered(self, stop: Delivery, outcome: Outcome, now_ms: int) -> tuple[Delivery, Decision]:
        """What an attempt at the backend means for the stop: its entry, and its new state."""
        backend = stop.backend
        assert backend is not None
        name, answer = backend.target, f"{backend.target}: {outcome.text()}"
        asked = backend.asked_ms is not None
        match outcome.backend:
            case "ended" if asked:
                return stop, Decision("delivered", f"the backend ended the job: {answer}")
            case "ended":
                return stop, Decision(
                    "delivered", f"the backend shows that the job is gone: {answer}"
                )
            case "replaced" if asked:
                why = f"the backend ended the job, and runs another incarnation: {answer}"
                return stop, Decision("delivered", why)
            case "replaced":
                why = f"another incarnation of the job runs, which continues: {answer}"
                return stop, Decision("suppressed", why)
            case "refused":
                return stop, Decision("rejected", f"the backend refused to end the job: {answer}")
            case "asked":
                changes = {"asked_ms": now_ms}
                stop = stop.model_copy(
                    update={
                        "backend": backend.model_copy(update=changes),
                        "give_up_ms": now_ms + self._confirm_ms(name),
                    }
                )
                why = f"the backend was asked to end the job; waits for its end: {answer}"
            case _ if now_ms >= stop.give_up_ms:
                why = "the backend could not be asked to end the job"
                if asked:
                    why = "the backend was asked to end the job, and has not been seen to end it"
                return stop, Decision("expired", f"{why}: {answer}")
            case _ if asked:
                why = f"the backend was asked to end the job, which is not gone yet: {answer}"
            case _:
                why = f"the backend could not be asked to end the job yet: {answer}"
        wait_ms = backoff_ms(stop.delivery_id, stop.attempts + 1, self.polling)
        wait_ms = max(wait_ms, retry_after_ms(outcome.retry_after, now_ms) or 0)
        return stop, Decision("pending", why, min(now_ms + wait_ms, stop.give_up_ms))

    def _confirm_ms(self, target: str) -> int:
        return self.confirm_ms.get(target, DEFAULT_CONFIRM_MS)


def ladder_end_ms(stop: Delivery, view: RunView) -> int:
    """When a launcher that obeys has ended the job at the latest, of a stop that was sent.

    It gives the job its grace for the exit point, once more while it saves, and again after
    SIGTERM.
    """
    mine = view.stop if view.stop and view.stop.command_id == stop.delivery_id else None
    states = {} if mine is None else mine.states
    grace_ms = round(1_000 * command_of(stop.event or {}).data.grace_s)
    if (escalated_ms := states.get("escalated")) is not None:
        return escalated_ms + grace_ms + SLACK_MS
    return states.get("acknowledged", sent_ms(stop)) + 3 * grace_ms + SLACK_MS
