"""What a launcher reads of its own run, made for tests: an issue, a delivery, a view."""

from __future__ import annotations

from tocsin.schemas.records.deliveries import Delivery, DeliveryState
from tocsin.schemas.records.issues import IssueFiring, Subject
from tocsin.schemas.records.run_view import RunState, RunView


def issue(kind: type[IssueFiring] = IssueFiring, **changes: object) -> IssueFiring:
    """A NaN in a layer's weights, seen on the second of two ranks."""
    fields: dict[str, object] = {
        "run_id": "r1", "incarnation": "i1", "world_size": 2, "issue_id": "x",
        "rule": "nonfinite", "use": "nonfinite", "rule_version": 1, "severity": "critical",
        "subject": Subject(kind="tensor", name="layer.weight"), "reason": "NaN\nin it",
        "first_step": 1200, "first_rank": 1,
    }  # fmt: skip
    return kind.model_validate(fields | changes)


def delivery(state: DeliveryState = "pending", **changes: object) -> Delivery:
    """Its notice to a webhook."""
    fields: dict[str, object] = {
        "delivery_id": "d", "issue_id": "x", "run_id": "r1", "incarnation": "i1",
        "rule": "nonfinite", "issue_state": "firing", "action": "chat", "kind": "webhook",
        "state": state, "reason": "accepted", "created_ms": 1, "updated_ms": 1, "give_up_ms": 9,
    }  # fmt: skip
    return Delivery.model_validate(fields | changes)


def view(state: RunState = "running", **changes: object) -> RunView:
    """How the rules see the run."""
    fields: dict[str, object] = {"run_id": "r1", "incarnation": "i1", "state": state}
    return RunView.model_validate(fields | changes)
