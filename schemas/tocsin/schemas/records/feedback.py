"""What people answer to an issue: they acknowledge it, resolve it, or call it a false alarm.

On the issues topic, beside the rules' own records of the issue, whose state they leave as it is: a
rule goes on judging what it sees.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self

from pydantic import Field, JsonValue

from tocsin.schemas.records.events import EVENT_TYPES, Data, clip, example
from tocsin.schemas.records.fields import MAX_TEXT, Id, Millis, Text, Word
from tocsin.schemas.records.issues import IssueFiring, IssueResolved

Verdict = Literal["acknowledged", "resolved", "false alarm"]

MAX_BY: Final = 200
"""Characters of a person's name."""

_ANSWER: Final = 1_000

_EXAMPLE: Final[dict[str, JsonValue]] = {
    "feedback_id": "5b0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
    "by": "ana@node-1",
    "at_ms": 1795258072300,
    "issue": {
        "run_id": "gpt-2026-11-21",
        "incarnation": "0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        "issue_id": "b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        "rule": "nonfinite",
        "use": "nonfinite",
        "rule_version": 1,
        "severity": "critical",
        "subject": {"kind": "loss", "name": "loss"},
        "reason": "the loss is NaN at step 1,200",
    },
}


class Feedback(Data):
    """A person's answer to an issue, with the issue as it was at that time.

    A reader needs no other record, not even after the topic's retention of 30 days.
    """

    verdict: ClassVar[Verdict]

    feedback_id: Id = Field(description="the same if the record is sent twice")
    by: Word = Field(
        min_length=1, max_length=MAX_BY, description="who answered: user@host, or a name"
    )
    at_ms: Millis = Field(description="when the answer was given")
    why: Text = Field(default="", description="in the person's words")
    issue: IssueFiring = Field(description="the newest state of the issue at that time")

    @property
    def run_id(self) -> str:
        """The run of the issue."""
        return self.issue.run_id

    @property
    def closes(self) -> bool:
        """Whether the issue is over for those who were notified of it."""
        return self.verdict != "acknowledged"

    @property
    def text(self) -> str:
        """In one line: `resolved by ana@node-1: known bad batch`."""
        answer = f"{self.verdict} by {self.by}"
        return f"{answer}: {self.why}" if self.why else answer

    def closed_issue(self) -> IssueResolved:
        """The issue as receivers get it when a person has closed it."""
        answer = clip(self.text, _ANSWER)
        found = clip(self.issue.reason, MAX_TEXT - len(answer) - len(" ()"))
        fields = self.issue.model_dump()
        fields |= {
            "at_ms": self.at_ms,
            "reason": f"{found} ({answer})",
            "muted": False,
            "last_notice": False,
        }
        return IssueResolved.model_validate(fields)

    @classmethod
    def on(
        cls, issue: IssueFiring, *, feedback_id: str, by: str, at_ms: int, why: str = ""
    ) -> Self:
        """Feedback on an issue in any of its states."""
        plain = IssueFiring.model_validate(issue.model_dump())
        return cls(feedback_id=feedback_id, by=by, at_ms=at_ms, why=why, issue=plain)


@EVENT_TYPES.register
class FeedbackAcknowledged(Feedback):
    """Somebody is working on the issue: notices are not repeated."""

    model_config = example(**_EXAMPLE)

    event_type: ClassVar[str] = "tocsin.feedback.acknowledged"
    verdict: ClassVar[Verdict] = "acknowledged"


@EVENT_TYPES.register
class FeedbackResolved(Feedback):
    """The issue was real and is resolved: receivers are notified."""

    model_config = example(**_EXAMPLE, why="restarted with a lower rate")

    event_type: ClassVar[str] = "tocsin.feedback.resolved"
    verdict: ClassVar[Verdict] = "resolved"


@EVENT_TYPES.register
class FeedbackFalseAlarm(Feedback):
    """The issue was a false alarm: receivers are notified, and the rule's precision falls."""

    model_config = example(**_EXAMPLE, why="a warm-up of the data set")

    event_type: ClassVar[str] = "tocsin.feedback.false_alarm"
    verdict: ClassVar[Verdict] = "false alarm"
