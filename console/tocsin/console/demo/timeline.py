"""What happened when: from the records of one run to a table of moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tocsin.console.demo.mailbox import Mail
from tocsin.console.demo.webhook_receiver import Received
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import Frame, StepFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopEscalated,
    StopExited,
    StopLeft,
)
from tocsin.schemas.text import exit_text


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A record of a run with its append time (Unix, milliseconds)."""

    append_ms: int
    value: Frame | Event[Data] | Snapshot


@dataclass(frozen=True, slots=True)
class Moment:
    """One row of the table. `at_ms` is Unix time in milliseconds on this machine's clock."""

    at_ms: float
    what: str
    detail: str = ""


def timeline(
    entries: Iterable[TimelineEntry],
    received: Sequence[Received],
    mails: Sequence[Mail] = (),
    *,
    fault_step: int,
    fault: str,
) -> list[Moment]:
    """The moments of a run that went bad, in order of time.

    The fault is placed at the end of the last step before it: the latest moment at which all
    was well.
    """
    moments: list[Moment] = []
    issue_ids = set()
    for record in entries:
        value = record.value
        if isinstance(value, StepFrame) and value.mode == "train":
            for step, at_us in zip(value.steps.tolist(), value.at_us.tolist(), strict=True):
                if step == fault_step - 1:
                    moments.append(Moment(at_us / 1000, f"step {fault_step} begins", fault))
        elif isinstance(value, Event):
            moment = _moment(record.append_ms, value.data)
            if moment is not None:
                moments.append(moment)
            if isinstance(value.data, IssueFiring):
                issue_ids.add(value.data.issue_id)
    for hook in received:
        if hook.issue is not None and hook.issue.issue_id in issue_ids:
            proof = "signature verified" if hook.verified else "SIGNATURE NOT VALID"
            moments.append(
                Moment(
                    hook.at_ms, "webhook arrives", f"{hook.issue.rule} {hook.issue.state}, {proof}"
                )
            )
    moments += [
        Moment(mail.at_ms, "mail arrives", mail.subject)
        for mail in mails
        if mail.issue_id in issue_ids
    ]
    # An entry of the ledger is written again whenever it changes.
    return sorted(dict.fromkeys(moments), key=lambda moment: moment.at_ms)


def _moment(append_ms: int, data: Data) -> Moment | None:
    if isinstance(data, IssueFiring) and data.state == "firing":
        return Moment(append_ms, f"issue: {data.rule}", data.reason)
    if isinstance(data, Delivery) and data.kind == "stop" and data.state == "pending":
        return _decision(data)
    if isinstance(data, StopAcknowledged):
        return Moment(append_ms, f"stop acknowledged by the {data.role}", "")
    if isinstance(data, StopLeft):
        return Moment(
            data.left_us / 1000, "training loop left", f"after step {data.step}, {data.edge}"
        )
    if isinstance(data, StopEscalated):
        return Moment(append_ms, f"{data.how} to the job", data.reason)
    if isinstance(data, StopExited):
        return Moment(append_ms, "job gone", f"{exit_text(data.how)}, exit code {data.exit_code}")
    return None


def _decision(stop: Delivery) -> Moment | None:
    if stop.attempts:
        return None
    if stop.waits_for_people:
        return Moment(stop.created_ms, "people are asked", stop.decided_by)
    approval = stop.approval
    if approval is not None and approval.decided_ms is not None:
        return Moment(approval.decided_ms, "stop approved", f"by {', '.join(approval.by)}")
    return Moment(stop.created_ms, "stop decided", stop.decided_by)
