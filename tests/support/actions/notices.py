"""Notices about issues, and the queues of receivers that they are given to."""

from __future__ import annotations

import asyncio

from support.records.issues import NOW_MS, issue_record
from tocsin.actions.decision.retry import Outcome, RetryPolicy, decide
from tocsin.actions.delivery.receiver_queues import Attempted, Notice, ReceiverQueue, ReceiverQueues
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.issues import IssueFiring


def notice(
    found: IssueFiring,
    attempts: int = 0,
    did: str = "It asked the run to stop.",
    *,
    kind: str = "email",
) -> Notice:
    """A notice about an issue, to a receiver that is named as its kind."""
    event = EVENT_TYPES.decode(issue_record(found).value or b"")
    delivery = Delivery(
        delivery_id=delivery_id(found.issue_id, kind, found.state),
        issue_id=found.issue_id,
        run_id=found.run_id,
        incarnation=found.incarnation,
        rule=found.rule,
        issue_state=found.state,
        action=kind,
        kind=kind,
        state="pending",
        reason="to be sent",
        created_ms=NOW_MS,
        updated_ms=NOW_MS,
        give_up_ms=NOW_MS + 86_400_000,
        attempts=attempts,
        event=event.model_dump(mode="json", exclude_none=True),
    )
    return Notice(delivery, NOW_MS + 1000 * attempts, (did,))


async def attempted(queue: ReceiverQueue, given: Notice) -> Outcome:
    """What comes of one attempt, whatever it raises."""
    reported: asyncio.Queue[Attempted] = asyncio.Queue()
    queues = ReceiverQueues(
        {given.delivery.action: queue}, reported.put_nowait, crash=lambda _: None
    )
    queues.start(given)
    outcome = (await reported.get()).outcome
    assert outcome is not None
    return outcome


def state(outcome: Outcome) -> str:
    """The state of a delivery after a first attempt with this outcome."""
    return decide(
        outcome,
        delivery_id="d",
        attempts=1,
        now_ms=NOW_MS,
        give_up_ms=NOW_MS + 86_400_000,
        policy=RetryPolicy(),
    ).state
