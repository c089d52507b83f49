"""Issues, run views and their records, made for tests of the actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.ids import delivery_id, incarnation_id, issue_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import (
    IssueFiring,
    IssueOngoing,
    IssueResolved,
    Severity,
    Subject,
)
from tocsin.schemas.records.run_view import RunView, StopView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

TOPICS = Topics()
NOW_MS = 1_795_258_012_300


def incarnation(run: str = "run-1", training: int = 0) -> str:
    return incarnation_id(run, "job", 0, training)


def issue(
    run: str = "run-1",
    rule: str = "nonfinite",
    episode: str = "1",
    *,
    severity: Severity = "critical",
    stop_worthy: bool = True,
    resolved: bool = False,
    raised_from: Severity | None = None,
    training: int = 0,
) -> IssueFiring:
    """An issue that fires; one that is over, or one that has risen from another severity."""
    made = incarnation(run, training)
    kind: Callable[..., IssueFiring] = IssueResolved if resolved else IssueFiring
    if raised_from is not None:
        kind = partial(IssueOngoing, raised_from=raised_from)
    return kind(
        run_id=run,
        incarnation=made,
        issue_id=issue_id(run, made, rule, 1, episode),
        rule=rule,
        use=rule,
        rule_version=1,
        severity=severity,
        stop_worthy=stop_worthy,
        subject=Subject(kind="loss", name="loss"),
        reason=f"NaN in the loss at step {episode}",
        first_step=3,
        at_ms=NOW_MS,
    )


def delivery(about: IssueFiring, action: str = "ml", **changes: object) -> Delivery:
    """A delivery about an issue that is to be sent, but for `changes`."""
    fields: dict[str, object] = {
        "delivery_id": delivery_id(about.issue_id, action, "firing", about.times),
        "issue_id": about.issue_id,
        "run_id": about.run_id,
        "incarnation": about.incarnation,
        "rule": about.rule,
        "issue_state": "firing",
        "action": action,
        "kind": "stop" if action == "stop" else "webhook",
        "state": "pending",
        "reason": "to be sent",
        "created_ms": NOW_MS,
        "updated_ms": NOW_MS,
        "give_up_ms": NOW_MS + 60_000,
    }
    return Delivery.model_validate(fields | changes)


def feedback(kind: type[Feedback], value: IssueFiring, why: str = "") -> Feedback:
    """What a person answers to an issue."""
    return kind.on(value, feedback_id=f"{kind.__name__}-1", by="ana@node", at_ms=NOW_MS, why=why)


def issue_record(value: IssueFiring) -> Outgoing:
    event = Event.wrap(
        value,
        id=f"{value.issue_id}/{value.state}/0",
        source=f"/runs/{value.run_id}/rules",
        time_ms=NOW_MS,
    )
    return record(event, TOPICS.issues, issue_partition(value.run_id), value.run_id)


def view(
    run: str = "run-1",
    *,
    ended: bool = False,
    stop: StopView | None = None,
    training: int = 0,
    next_offset: int = 1,
) -> RunView:
    return RunView(
        run_id=run,
        incarnation=incarnation(run, training),
        state="ended" if ended else "running",
        exit_code=79 if ended else None,
        stop=stop,
        next_offset=next_offset,
    )


def view_record(value: RunView, *, time_ms: int = NOW_MS) -> Outgoing:
    event = Event.wrap(value, id="view", source="/rules", time_ms=time_ms)
    return record(event, TOPICS.runs, telemetry_partition(value.run_id), value.run_id)


def record(event: Event[Data], topic: str, number: int, key: str) -> Outgoing:
    return Outgoing(
        Partition(topic, number), key.encode(), event.encode(), meta_of(event).headers()
    )


def runs_view(*data: Data) -> RunsView:
    """What the reading commands know when these are on the bus."""
    known = RunsView()
    for each in data:
        known.add(each, append_ms=NOW_MS)
    return known
