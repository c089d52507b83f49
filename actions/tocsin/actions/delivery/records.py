"""The records of the ledger that the actions write."""

from __future__ import annotations

import json
from functools import lru_cache

from pydantic import JsonValue
from pydantic_core import from_json

from tocsin.actions.decision.planned import STOP, Planned
from tocsin.actions.ledger.final_entries import Settled
from tocsin.bus.port import Headers, Outgoing, Partition
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.deliveries import DRILL, NEW, RESOLVED, WORSE, Delivery
from tocsin.schemas.records.digests import Digest
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event, clip
from tocsin.schemas.records.issues import Issue, IssueFiring, issue_event
from tocsin.schemas.records.wire import Meta, meta_of
from tocsin.schemas.topics import DLQ_PARTITIONS, Topics, issue_partition, partition_for


def new_delivery(
    identity: str, issue: Issue, planned: Planned, payload: bytes, *, now_ms: int, give_up_ms: int
) -> Delivery:
    """The entry of what was planned about an issue; `payload` is the event that is to be sent."""
    return Delivery(
        delivery_id=identity,
        issue_id=issue.issue_id,
        run_id=issue.run_id,
        incarnation=issue.incarnation,
        rule=issue.rule,
        issue_state=issue.state,
        issue_times=issue.times,
        occasion="" if planned.kind == STOP else planned.occasion or occasion_of(issue),
        severity=issue.severity,
        action=planned.action,
        kind=planned.kind,
        state="pending",
        reason="to be sent",
        held=None if planned.held is None else planned.held.by,
        decided_by=clip(planned.decided_by, 300),
        created_ms=now_ms,
        updated_ms=now_ms,
        next_attempt_ms=now_ms + planned.wait_ms,
        give_up_ms=give_up_ms,
        event=from_json(payload),
    )


def occasion_of(issue: Issue) -> str:
    """Why receivers are notified of a state of an issue."""
    if issue.labels.get("drill") == "true":
        return DRILL
    if issue.state == "resolved":
        return RESOLVED
    return WORSE if issue.turned_critical else NEW


def delivery_record(topics: Topics, delivery: Delivery, boot: str = "") -> Outgoing:
    """An entry of the ledger; `boot` is of who writes it."""
    event = _event(delivery)
    partition = Partition(topics.actions, issue_partition(delivery.run_id))
    return Outgoing(partition, delivery.key.encode(), event.encode(), _headers(boot))


@lru_cache(maxsize=16)
def _headers(boot: str) -> Headers:
    return Meta(Delivery.event_type, Delivery.version, boot=boot).headers()


def issue_record(topics: Topics, issue: IssueFiring, time_ms: int) -> Outgoing:
    """An issue that the action service opens itself, as a rule's is on the bus."""
    event = unpublished_event(issue, time_ms)
    partition = Partition(topics.issues, issue_partition(issue.run_id))
    return Outgoing(partition, issue.run_id.encode(), event.encode(), meta_of(event).headers())


def unpublished_event(issue: IssueFiring, time_ms: int) -> Event[Data]:
    """The event of an issue's state that no rule has published."""
    return issue_event(issue, event_id=f"{issue.issue_id}/{issue.state}/0", time_ms=time_ms)


def failed_letter(
    topics: Topics, delivery: Delivery, before: Delivery | None, now_ms: int
) -> Outgoing:
    """A failed delivery as a dead letter, with its event, so that it can be sent once more."""
    event = _event(
        delivery if before is None else delivery.model_copy(update={"event": before.event})
    )
    letter = DeadLetter(
        topic=topics.actions,
        partition=issue_partition(delivery.run_id),
        offset=0,
        error=delivery.state.capitalize(),
        message=clip(delivery.reason, 500),
        service="actions",
        at_ms=now_ms,
    )
    key = delivery.key.encode()
    partition = Partition(topics.dlq, partition_for(key, DLQ_PARTITIONS))
    return Outgoing(partition, key, event.encode(), letter.headers() + meta_of(event).headers())


def tombstone(topics: Topics, settled: Settled) -> Outgoing:
    """The end of an entry."""
    partition = Partition(topics.actions, issue_partition(settled.run_id))
    return Outgoing(partition, settled.key.encode(), None)


def event_of(delivery: Delivery) -> dict[str, JsonValue]:
    """The CloudEvent of a notice, with why it is sent: `occasion`, and `decidedby` which line."""
    why: dict[str, JsonValue] = {"occasion": delivery.occasion, "decidedby": delivery.decided_by}
    event: dict[str, JsonValue] = dict(delivery.event or {})
    return event | {name: value for name, value in why.items() if value}


def issue_of(delivery: Delivery) -> Issue:
    """The issue that a delivery is about, from its event.

    Raises:
        RecordError: it holds none.
    """
    event = EVENT_TYPES.decode(json.dumps(delivery.event).encode())
    if not isinstance(event.data, Issue):
        raise MalformedRecord("the ledger's entry holds no issue")
    return event.data


def digest_of(delivery: Delivery) -> Digest:
    """The content of a digest, from its event.

    Raises:
        RecordError: it holds none.
    """
    event = EVENT_TYPES.decode(json.dumps(delivery.event).encode())
    if not isinstance(event.data, Digest):
        raise MalformedRecord("the ledger's entry holds no digest")
    return event.data


def _event(delivery: Delivery) -> Event[Delivery]:
    return Event.wrap(
        delivery,
        id=f"{delivery.delivery_id}/{delivery.attempts}/{delivery.state}",
        source="/actions",
        time_ms=delivery.updated_ms,
        subject=f"/runs/{delivery.run_id}",
    )
