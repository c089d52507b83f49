"""How far a stop has come, by what the run answered."""

from __future__ import annotations

from typing import Final, Literal

from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopAnswer,
    StopCheckpoint,
    StopEscalated,
    StopExited,
    StopExpired,
    StopLeft,
    StopRefused,
)

_State = Literal[
    "requested",
    "acknowledged",
    "checkpoint_decided",
    "left",
    "exited",
    "escalated",
    "refused",
    "expired",
]
_ORDER: Final[tuple[_State, ...]] = (
    "refused",
    "expired",
    "requested",
    "acknowledged",
    "checkpoint_decided",
    "left",
    "escalated",
    "exited",
)


def answered(view: StopView | None, answer: StopAnswer, now_ms: int) -> StopView | None:
    """The view after an answer. Refusals of a second command leave the first one's view alone."""
    state = _state(answer)
    if state is None:
        return view
    if view is None or view.command_id != answer.command_id:
        if view is not None and (
            state in ("refused", "expired") or view.state not in ("refused", "expired")
        ):
            return view
        view = StopView(state=state, command_id=answer.command_id)
    further = _ORDER.index(state) >= _ORDER.index(view.state)
    update: dict[str, object] = {
        "states": {state: now_ms, **view.states},
        "state": state if further else view.state,
        "issue_id": view.issue_id or answer.issue_id,
    }
    if isinstance(answer, StopLeft):
        update |= {"step": answer.step, "how": view.how or "edge"}
    elif isinstance(answer, StopCheckpoint):
        # What went wrong on one rank counts more than what the others did.
        if not view.decision or answer.decision == "not_saved":
            update |= {"decision": answer.decision, "checkpoint": answer.checkpoint}
            update["reason"] = answer.reason or view.reason
    elif isinstance(answer, StopAcknowledged) and view.step is None:
        update["step"] = answer.leave_at
    elif isinstance(answer, StopEscalated):
        update |= {"how": answer.how, "reason": answer.reason}
    elif isinstance(answer, StopExited):
        update |= {"how": answer.how, "exit_code": answer.exit_code}
    elif isinstance(answer, StopRefused):
        update["reason"] = answer.reason or answer.why
    elif isinstance(answer, StopExpired):
        update["reason"] = answer.reason
    return view.model_copy(update=update)


def _state(answer: StopAnswer) -> _State | None:
    for model, state in _STATES:
        if isinstance(answer, model):
            return state
    return None


_STATES: Final[tuple[tuple[type[StopAnswer], _State], ...]] = (
    (StopAcknowledged, "acknowledged"),
    (StopCheckpoint, "checkpoint_decided"),
    (StopLeft, "left"),
    (StopEscalated, "escalated"),
    (StopExited, "exited"),
    (StopRefused, "refused"),
    (StopExpired, "expired"),
)
