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
    """One attempt that was made. `result` never holds the peer's body."""

    at_ms: Millis = Field(description="when it was made")
    result: Word = Field(
        max_length=300,
        examples=["503 Service Unavailable"],
        description="what the peer answered, in a few words",
    )
    retry: bool = Field(description="whether it is worth another attempt")
    duration_ms: Whole = Field(default=0, description="how long it took, milliseconds")


class Repeats(Model):
    """How often a notice is repeated while its issue is active and nobody has answered it."""

    every_ms: Positive | None = Field(default=None, description="None: not, but for the urgent")
    urgent_every_ms: Positive | None = Field(default=None, description="until `urgent_until_ms`")
    urgent_until_ms: Millis = Field(default=0, description="until when the notice is urgent")
    wait_ms: Whole = Field(default=0, description="within which time repeats are one message")


class Approval(Model):
    """The question whether a run is to be stopped, and the answers so far."""

    why: Text = Field(description="why people are asked: the mode, or the limit")
    until_ms: Millis = Field(description="how long it waits for answers")
    on_timeout: Literal["skip", "stop"] = Field(
        default="skip", description="what happens without an answer in time"
    )
    quorum: Positive = Field(default=1, description="how many people must approve")
    by: Many[Word] = Field(default=(), max_length=16, description="who has approved")
    decided_ms: Millis | None = Field(
        default=None, description="when the stop was released; None while it waits"
    )


class BackendStop(Model):
    """The backend that is to end a job whose launcher has not ended it."""

    target: Word = Field(max_length=100, description="its name in the configuration")
    job: SchedulerJob = Field(description="as this incarnation of the run has recorded it")
    started_ms: Millis = Field(default=0, description="when this incarnation started")
    permitted_by: Word = Field(max_length=300, description="the line of the policy")
    begun_ms: Millis = Field(description="when it was its turn")
    asked_ms: Millis | None = Field(
        default=None, description="when it has accepted to end the job; None: not yet"
    )


@EVENT_TYPES.register
class Delivery(Data):
    """The newest state of one notice or stop: written before the first attempt and after each."""

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

    delivery_id: Id = Field(description="the same in all attempts, from whichever process")
    issue_id: Id = Field(description="the issue that it is about")
    run_id: RunId
    incarnation: Incarnation
    rule: str = Field(max_length=100, description="the rule instance that found the issue")
    issue_state: IssueState = Field(description="the state of the issue that it reports")
    issue_times: Positive = Field(
        default=1, description="how many times the issue's condition had come"
    )
    occasion: str = Field(
        default="",
        max_length=32,
        description="why it is sent: the issue is `new`, `worse`, `resolved` or `acknowledged` by "
        "a person, this is a `repeat`, a `drill`, or `late`: the first notice, because an earlier "
        "one was held, or `stopped`: its message is edited, since the stop of its run has ended; "
        "`digest`: it is about no issue, and `issue_id` is that of the interval; empty in entries "
        "of earlier releases",
    )
    severity: Severity | None = Field(default=None, description="of the issue in this state")
    group: Word = Field(
        default="", max_length=500, description="what it has in common with others of its message"
    )
    sent_as: Id | None = Field(
        default=None,
        description="the id of the message, if it is sent together with others; else that of the "
        "delivery",
    )
    repeat: Whole = Field(default=0, description="which repeat it is; 0 in other notices")
    repeats: Repeats | None = Field(
        default=None, description="how often it is repeated; None: it is not"
    )
    action: str = Field(max_length=100, description="the receiver's name, or `stop`")
    kind: str = Field(max_length=32, description="webhook, stop, …")
    state: DeliveryState = Field(description="the last four are final")
    reason: Text = Field(description="why it is in this state")
    held: HeldBy | None = Field(
        default=None, description="what kept it from being sent, if it was suppressed for that"
    )
    decided_by: Word = Field(
        default="", max_length=300, description="the config line, or the default, that requested it"
    )
    created_ms: Millis = Field(description="when it was decided")
    updated_ms: Millis = Field(description="when this state was written")
    attempts: Whole = Field(default=0, description="made so far")
    last_attempts: Many[Attempt] = Field(
        default=(), max_length=8, description="the newest, oldest first"
    )
    next_attempt_ms: Millis | None = Field(
        default=None, description="the retry schedule; None when final"
    )
    give_up_ms: Millis = Field(description="after this it expires")
    redrives: Whole = Field(
        default=0, description="how many times a person requested it once more after it had failed"
    )
    suspended_until_ms: Millis | None = Field(
        default=None, description="its receiver fails and is left alone until then"
    )
    handle: Word | None = Field(
        default=None,
        max_length=100,
        description="what the receiver calls the message, so that a later state of the issue can "
        "edit it",
    )
    approval: Approval | None = Field(
        default=None, description="of a stop that people must approve before it is sent"
    )
    backend: BackendStop | None = Field(
        default=None, description="of a stop that the run has not confirmed in time"
    )
    # JSON that was parsed already: to walk through it once more costs more than all else here.
    event: dict[str, Any] | None = Field(
        default=None,
        description="the issue's CloudEvent, so that a retry needs no other record; "
        "left out when final",
    )
    issue_event: dict[str, Any] | None = Field(
        default=None,
        description="of a stop: the newest CloudEvent of its issue, so that messages can show how "
        "the stop has ended; left out when final",
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
