"""The stop of a run: the signed command, and what the run's answers make of its delivery. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, cast

from pydantic import JsonValue

from tocsin.actions.decision.retry import Decision
from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.configuration.sections import StopOptions
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.deliveries import Delivery, DeliveryState
from tocsin.schemas.records.events import EVENT_TYPES, Event
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.runs_fold import RunSeen
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.records.wire import meta_of, signature_headers
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.text import exit_text
from tocsin.schemas.topics import Topics, issue_partition

NOT_AFTER_MS: Final = 600_000
"""A command is valid for ten minutes after it was decided."""

ANSWER_MS: Final = 3_000
"""Answers may follow the end of a run for that long."""

_CONFIRM_MS: Final = 60_000
_NONCES: Final = uuid.UUID("0e1b8f1e-3a57-5a0e-9a0c-52a1c1f3c0de")


_SENTENCES: Final[Mapping[DeliveryState, str]] = {
    "pending": "It asked the run to stop",
    "delivered": "It stopped the run",
    "rejected": "It asked the run to stop; the run refused",
    "expired": "It asked the run to stop; the run did not confirm it",
    "suppressed": "It sent no stop",
}


def sentence(state: DeliveryState, reason: str, waits: bool = False) -> str:
    """What notices report of a stop, with the reason of its delivery where it did not work.

    `waits`: people must approve it.
    """
    if waits:
        return f"It asks whether to stop the run: {reason.rstrip('.')}."
    text = _SENTENCES[state]
    why = reason.rstrip(".") if state not in ("pending", "delivered") else ""
    return f"{text}: {why}." if why else f"{text}."


def stop_command(
    issue: Issue, delivery_id: str, options: StopOptions, *, requested_by: str, now_ms: int
) -> Event[StopRequested]:
    """The command for the incarnation that the issue is about.

    It is written into the ledger and sent from there, so that a repeat is the same to the byte;
    the nonce follows from the delivery anyway.
    """
    # Where nothing can be saved, that one is to go on from.
    protects = options.checkpoint != "skip"
    command = StopRequested(
        command_id=delivery_id,
        run_id=issue.run_id,
        incarnation=issue.incarnation,
        issue_id=issue.issue_id,
        rule=issue.rule,
        reason=issue.reason,
        requested_by=requested_by,
        requested_ms=now_ms,
        not_after_ms=now_ms + NOT_AFTER_MS,
        nonce=str(uuid.uuid5(_NONCES, delivery_id)),
        grace_s=options.grace / timedelta(seconds=1),
        checkpoint=options.checkpoint,
        last_good_checkpoint=issue.last_good_checkpoint if protects else None,
    )
    return Event.wrap(
        command,
        id=delivery_id,
        source="/actions",
        time_ms=now_ms,
        subject=f"/runs/{issue.run_id}",
    )


def renewed(stop: Delivery, now_ms: int) -> Event[StopRequested]:
    """The command of a stop that was approved: it is valid from now on.

    Raises:
        MalformedRecord: the ledger's entry holds no stop command.
    """
    command = command_of(stop.event or {})
    data = command.data.model_copy(
        update={"requested_ms": now_ms, "not_after_ms": now_ms + NOT_AFTER_MS}
    )
    return Event.wrap(
        data, id=command.id, source="/actions", time_ms=now_ms, subject=command.subject
    )


def sent_from_ms(stop: Delivery) -> int:
    """When a stop was decided, or approved where people were asked."""
    approval = stop.approval
    return (approval.decided_ms if approval is not None else None) or stop.created_ms


def sent_no_more(stop: Delivery, now_ms: int) -> bool:
    """Whether a stop is not sent (again): its command is on the bus, or is not valid any more."""
    return was_sent(stop) or now_ms > sent_from_ms(stop) + NOT_AFTER_MS


def was_sent(stop: Delivery) -> bool:
    """Whether the command is on the bus. Not after attempts at which the bus was away: it may be,
    and is the same when it is sent again."""
    # Of many attempts at a backend the entry keeps the newest only.
    return stop.backend is not None or any(not attempt.retry for attempt in stop.last_attempts)


def sent_ms(stop: Delivery) -> int:
    """When the command came onto the bus, of a stop that was sent."""
    sent = (attempt.at_ms for attempt in stop.last_attempts if not attempt.retry)
    return next(sent, sent_from_ms(stop))


def give_up_ms(options: StopOptions, now_ms: int) -> int:
    """When a stop that was not confirmed is given up: after its last use and all escalation."""
    return now_ms + NOT_AFTER_MS + 4 * (options.grace // timedelta(milliseconds=1)) + _CONFIRM_MS


def signed_record(topics: Topics, event: dict[str, JsonValue], key: SigningKey) -> Outgoing:
    """The record for the control topic, from the command as the ledger keeps it.

    Raises:
        MalformedRecord: that is no stop command.
    """
    command = command_of(event)
    name, value = command.data.key.encode(), command.encode()
    headers = meta_of(command).headers() + signature_headers(key.sign(name, value))
    partition = Partition(topics.control, issue_partition(command.data.run_id))
    return Outgoing(partition, name, value, headers)


def command_of(event: dict[str, JsonValue]) -> Event[StopRequested]:
    """The command of a stop, as its entry in the ledger keeps it until it is final.

    Raises:
        MalformedRecord: that is no stop command.
    """
    command = EVENT_TYPES.decode(json.dumps(event).encode())
    if not isinstance(command.data, StopRequested):
        raise MalformedRecord("the ledger's entry holds no stop command")
    return cast("Event[StopRequested]", command)


def is_behind(run: RunSeen, issue: Issue) -> bool:
    """Whether the issue is of an incarnation that the run's newest view cannot know yet.

    Issues are on the bus before the view that covers them.
    """
    return run.incarnation != issue.incarnation and run.as_of_ms <= issue.at_ms


def why_over(run: RunSeen, incarnation: str) -> str | None:
    """Why an incarnation cannot be stopped any more; None if it may still run."""
    if run.incarnation != incarnation:
        return "another incarnation of the run has begun"
    if run.ended is not None:
        code = "" if run.ended.exit_code is None else f" with exit code {run.ended.exit_code}"
        return f"the run has ended{code}"
    return None


def why_no_stop(
    run: RunSeen | None, incarnation: str, *, delivery_id: str, age_ms: int
) -> str | None:
    """Why a stop must not be sent now; None if it may."""
    if run is None:
        if age_ms > NOT_AFTER_MS:
            return "nothing is known of the run, and the issue is more than 10 minutes old"
        return None
    if (over := why_over(run, incarnation)) is not None:
        return over
    stop = run.stop
    if stop is not None and stop.command_id != delivery_id:
        if stop.state in ("requested", "acknowledged", "checkpoint_decided", "left", "escalated"):
            return f"a stop of this incarnation is under way (command {stop.command_id})"
        if stop.state == "exited":
            return f"this incarnation was stopped already (command {stop.command_id})"
    return None


def decide_stop(run: RunSeen | None, delivery: Delivery, now_ms: int) -> Decision | None:
    """What the run's views mean for a stop that was sent; None while they show nothing new."""
    if run is None:
        return None
    # The next incarnation may have begun before anybody looked.
    view = run.views.get(delivery.incarnation)
    mine = None if view is None else view.stop
    if mine is not None and mine.command_id != delivery.delivery_id:
        mine = None
    if mine is not None:
        if mine.state == "exited":
            how = "" if mine.how is None else f" {exit_text(mine.how)}"
            code = "" if mine.exit_code is None else f" with exit code {mine.exit_code}"
            return Decision("delivered", f"the job exited{how}{code}")
        if mine.state == "refused":
            return Decision("rejected", f"the run refused: {mine.reason or 'no reason given'}")
        if mine.state == "expired":
            return Decision("expired", mine.reason or "no rank answered")
    over = why_over(run, delivery.incarnation)
    if over is None:
        return None
    if delivery.next_attempt_ms is None or now_ms < delivery.next_attempt_ms:
        soon = now_ms + ANSWER_MS
        if delivery.next_attempt_ms is not None and delivery.next_attempt_ms <= soon:
            return None
        return Decision("pending", f"{over}; waiting for the last answers", soon)
    if mine is not None and mine.state in (
        "acknowledged",
        "checkpoint_decided",
        "left",
        "escalated",
    ):
        return Decision("delivered", f"acknowledged, and {over}")
    if delivery.backend is not None and delivery.backend.asked_ms is not None:
        return Decision("delivered", f"{delivery.backend.target} was asked to end it, and {over}")
    return Decision("suppressed", f"{over} before the stop took effect")
