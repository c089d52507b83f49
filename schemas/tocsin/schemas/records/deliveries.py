"""The ledger: what became of each (issue, action)."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, Model, example
from tocsin.schemas.records.fields import (
    Id,
    Incarnation,
    Many,
    Millis,
    Positive,
    RunId,
    Text,
    Whole,
    Word,
)
from tocsin.schemas.records.issues import IssueState, Severity
from tocsin.schemas.records.runs import SchedulerJob

DeliveryState = Literal["pending", "delivered", "rejected", "suppressed", "expired"]
NEW: Final = "new"
WORSE: Final = "worse"
REPEAT: Final = "repeat"
RESOLVED: Final = "resolved"
ACKNOWLEDGED: Final = "acknowledged"
LATE: Final = "late"
DRILL: Final = "drill"
STOPPED: Final = "stopped"
DIGEST: Final = "digest"
STARTS: Final = frozenset({NEW, WORSE, LATE})
"""Occasions of notices that an issue has begun, or turned critical."""

HeldBy = Literal[
    "silence",
    "inhibition",
    "time_window",
    "cause",
    "shadow",
    "limit",
    "switch",
    "rejected",
    "unanswered",
]
"""What keeps a notice or a stop from being sent. As soon as it no longer keeps a notice, the issue
may be sent."""

FINAL_STATES: Final = frozenset({"delivered", "rejected", "suppressed", "expired"})


class Attempt(Model):
    """One delivery attempt. `result` never contains the body of the response."""

    at_ms: Millis = Field(description="when the attempt was made")
    result: Word = Field(
        max_length=300,
        examples=["503 Service Unavailable"],
        description="the response of the receiver, in a few words",
    )
    retry: bool = Field(description="whether another attempt makes sense")
    duration_ms: Whole = Field(default=0, description="how long it took, milliseconds")


class Repeats(Model):
    """How often a notice is repeated while its issue is active and nobody has answered it."""

    every_ms: Positive | None = Field(
        default=None, description="None: only urgent notices are repeated"
    )
    urgent_every_ms: Positive | None = Field(
        default=None, description="interval until `urgent_until_ms`"
    )
    urgent_until_ms: Millis = Field(default=0, description="until when the notice is urgent")
    wait_ms: Whole = Field(
        default=0, description="repeats that are due within this time are sent as one message"
    )


class Approval(Model):
    """The request for approval of a stop, and the answers so far."""

    why: Text = Field(description="why approval is required: the mode, or the limit")
    until_ms: Millis = Field(description="when the request expires")
    on_timeout: Literal["skip", "stop"] = Field(
        default="skip", description="what happens without an answer in time"
    )
    quorum: Positive = Field(default=1, description="number of people who must approve")
    by: Many[Word] = Field(default=(), max_length=16, description="who has approved")
    decided_ms: Millis | None = Field(
        default=None, description="when the stop was released; None while it is pending"
    )


class BackendStop(Model):
    """The backend that ends a job if its launcher has not ended it."""

    target: Word = Field(max_length=100, description="its name in the configuration")
    job: SchedulerJob = Field(description="the job, as this incarnation of the run has recorded it")
    started_ms: Millis = Field(default=0, description="when this incarnation started")
    permitted_by: Word = Field(max_length=300, description="the line of the policy that permits it")
    begun_ms: Millis = Field(description="when the backend's turn came")
    asked_ms: Millis | None = Field(
        default=None, description="when the backend accepted the request; None: not yet"
    )


@EVENT_TYPES.register
class Delivery(Data):
    """The newest state of a notice or a stop. It is written before the first attempt and after
    each.
    """

    model_config = example(
        delivery_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        issue_id="b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rule="nonfinite",
        issue_state="firing",
        action="ml-lambda",
        kind="webhook",
        state="delivered",
        reason="200 OK",
        decided_by="tocsin.yaml:14:3",
        created_ms=1795258012300,
        updated_ms=1795258012420,
        attempts=1,
        last_attempts=[
            {"at_ms": 1795258012310, "result": "200 OK", "retry": False, "duration_ms": 104}
        ],
        give_up_ms=1795344412300,
    )

    event_type: ClassVar[str] = "tocsin.delivery"

    delivery_id: Id = Field(description="the same in all attempts, whichever process makes them")
    issue_id: Id = Field(description="the issue that it is about")
    run_id: RunId
    incarnation: Incarnation
    rule: str = Field(max_length=100, description="the rule instance that found the issue")
    issue_state: IssueState = Field(description="the state of the issue that it reports")
    issue_times: Positive = Field(
        default=1, description="how many times the issue's condition had occurred"
    )
    occasion: str = Field(
        default="",
        max_length=32,
        description=(
            "why it is sent. `new`, `worse`, `resolved`, `acknowledged`: what happened to the "
            "issue. `repeat`: a reminder. `drill`: a test. `late`: first notice, because earlier "
            "ones were held back. `stopped`: the message is edited because the stop has finished. "
            "`digest`: it is about no issue, and `issue_id` is the id of the interval. Empty in "
            "entries of earlier releases."
        ),
    )
    severity: Severity | None = Field(
        default=None, description="severity of the issue in this state"
    )
    group: Word = Field(
        default="",
        max_length=500,
        description="what it has in common with the other notices of its message",
    )
    sent_as: Id | None = Field(
        default=None,
        description=(
            "the id of the message, if it is sent together with others; otherwise the message has "
            "the delivery's id"
        ),
    )
    repeat: Whole = Field(default=0, description="the number of the repeat; 0 for other notices")
    repeats: Repeats | None = Field(
        default=None, description="how often it is repeated; None: never"
    )
    action: str = Field(max_length=100, description="the receiver's name, or `stop`")
    kind: str = Field(max_length=32, description="webhook, stop, …")
    state: DeliveryState = Field(description="all states except `pending` are final")
    reason: Text = Field(description="why it is in this state")
    held: HeldBy | None = Field(
        default=None, description="what held it back, if it is suppressed for that reason"
    )
    decided_by: Word = Field(
        default="",
        max_length=300,
        description="the configuration line, or the default, that requested it",
    )
    created_ms: Millis = Field(description="when it was decided")
    updated_ms: Millis = Field(description="when this state was written")
    attempts: Whole = Field(default=0, description="number of attempts so far")
    last_attempts: Many[Attempt] = Field(
        default=(), max_length=8, description="the newest attempts, oldest first"
    )
    next_attempt_ms: Millis | None = Field(
        default=None, description="when the next attempt is due; None when final"
    )
    give_up_ms: Millis = Field(description="when it expires")
    redrives: Whole = Field(
        default=0, description="how many times a person has requested it again after it had failed"
    )
    redriven_ms: Millis | None = Field(
        default=None, description="when a person has requested it again; None: nobody has"
    )
    suspended_until_ms: Millis | None = Field(
        default=None, description="deliveries to its failing receiver are paused until then"
    )
    handle: Word | None = Field(
        default=None,
        max_length=100,
        description=(
            "the receiver's id of the message, so that a later state of the issue can edit it"
        ),
    )
    approval: Approval | None = Field(
        default=None, description="for a stop that must be approved before it is sent"
    )
    backend: BackendStop | None = Field(
        default=None, description="for a stop that the run has not confirmed in time"
    )
    # JSON that was parsed already: to walk through it once more costs more than all else here.
    event: dict[str, Any] | None = Field(
        default=None,
        description=(
            "the issue's CloudEvent, so that a retry needs no other record; omitted when final"
        ),
    )
    issue_event: dict[str, Any] | None = Field(
        default=None,
        description=(
            "for a stop: the newest CloudEvent of its issue, so that messages can show the outcome "
            "of the stop; omitted when final"
        ),
    )

    @property
    def key(self) -> str:
        """`issue/action`, with the occasion or the issue's state and time where they are not the
        first.
        """
        about: str = self.issue_state
        if self.occasion in (ACKNOWLEDGED, LATE, STOPPED, DIGEST):
            about = self.occasion
        elif self.occasion == REPEAT:
            about = f"{self.issue_state}/repeat/{self.repeat}"
        suffix = "" if about == "firing" else f"/{about}"
        if self.issue_times > 1:
            suffix = f"/{about}/{self.issue_times}"
        return f"{self.issue_id}/{self.action}{suffix}"

    @property
    def message_id(self) -> str:
        """The id of the message that it is sent in; the same in each attempt."""
        return self.sent_as or self.delivery_id

    @property
    def waits_for_people(self) -> bool:
        """Whether it is a stop that is not sent before people approve."""
        asked = self.approval is not None and self.approval.decided_ms is None
        return asked and self.state == "pending"

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """Of two entries of one delivery the higher one counts, whichever was written last: a
        worker that was frozen and wakes up may write what it was at. What belongs to a redrive is
        newer than the final state before it."""
        return self.redrives, self.final, self.attempts, self.updated_ms

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in FINAL_STATES
