"""A delivery that has failed is sent once more, since a person asked for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tocsin.actions.decision.planned import STOP
from tocsin.actions.delivery.order import follows
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import clip


def redriven(
    letter: Delivery, ledger: Iterable[Delivery], *, by: str, now_ms: int
) -> Delivery | str:
    """The entry with which it is sent once more, under the same id; or why it is not.

    `letter` is its dead letter, `ledger` the newest states of its run's deliveries. Nothing that
    was delivered is sent again, nor what would set a receiver back to an earlier state of an issue.
    """
    if letter.kind == STOP:
        return "a stop is not sent again; `tocsin stop` requests a new one"
    if letter.event is None:
        return "its dead letter holds no event"
    redrives = 0
    for other in ledger:
        if other.delivery_id == letter.delivery_id:
            if other.state not in ("expired", "rejected"):
                return f"it is {other.state} already"
            redrives = other.redrives
        elif other.state == "delivered" and follows(other, letter):
            return f"a later state of the issue was delivered: {other.issue_state}"
    return letter.model_copy(
        update={
            "state": "pending",
            "reason": clip(f"to be sent once more, requested by {by}"),
            "redrives": redrives + 1,
            "attempts": 0,
            "updated_ms": max(now_ms, letter.updated_ms),
            "next_attempt_ms": now_ms,
            "give_up_ms": now_ms + letter.give_up_ms - letter.created_ms,
            "suspended_until_ms": None,
        }
    )
