"""Issues: what a rule has found, where it began, and how it went on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tocsin.schemas.events import EVENT_TYPES, MAX_TEXT, Model
from tocsin.schemas.real import Real
from tocsin.schemas.runs import Checkpoint, RunData

Severity = Literal["info", "warning", "critical"]
IssueState = Literal["firing", "ongoing", "resolved"]
SubjectKind = Literal[
    "tensor", "layer", "loss", "scalar", "learning_rate", "rank", "device", "node", "rule", "run"
]


class Subject(Model):
    """What the issue is about: `gradients/blocks.3.attention.qkv.weight`, `loss`, `rank 1`, …"""

    kind: SubjectKind
    name: str = Field(max_length=512)
    collection: str | None = Field(default=None, max_length=64)


class Fact(Model):
    """One number or word of the evidence, for example `nans` 12, or `ratio` 41.2 with limit 20."""

    name: str = Field(max_length=100)
    value: Real | str
    limit: Real | None = None
    unit: str | None = Field(default=None, max_length=32)


class Series(Model):
    """The deciding series: the last points up to the firing step, and the limit crossed."""

    name: str = Field(max_length=200)
    unit: str | None = Field(default=None, max_length=32)
    steps: tuple[int, ...] = Field(max_length=512)
    values: tuple[Real, ...] = Field(max_length=512)
    limit: Real | None = None


class Evidence(Model):
    """Why the rule says so."""

    facts: tuple[Fact, ...] = Field(default=(), max_length=64)
    series: Series | None = None
    followed: int = Field(
        default=0, ge=0, description="how many further tensors or ranks went the same way"
    )
    also: tuple[str, ...] = Field(default=(), max_length=32, description="the next ones, by name")
    explanation: str = Field(
        default="", max_length=MAX_TEXT, description="how the origin was decided"
    )


@EVENT_TYPES.register
class IssueFiring(RunData):
    """An issue, in one of its states. The id is the same in all states of one episode."""

    event_type: ClassVar[str] = "tocsin.issue.firing"
    state: ClassVar[IssueState] = "firing"

    issue_id: str = Field(max_length=64)
    rule: str = Field(max_length=100, description="the rule instance's name")
    use: str = Field(max_length=100, description="the rule in the catalogue")
    rule_version: int = Field(ge=1)
    severity: Severity
    stop_worthy: bool = Field(default=False, description="whether it may stop the run by default")
    subject: Subject
    reason: str = Field(max_length=MAX_TEXT, description="one sentence: what, where first, how bad")
    remedy: str = Field(default="", max_length=MAX_TEXT)
    first_step: int | None = Field(default=None, ge=0)
    first_rank: int | None = Field(default=None, ge=0)
    step: int | None = Field(
        default=None, ge=0, description="the run's step when this state was decided"
    )
    onset_ms: int = Field(
        default=0, ge=0, description="append time of the record that began it, Unix milliseconds"
    )
    at_ms: int = Field(
        default=0, ge=0, description="append time of the record that decided this state"
    )
    labels: dict[str, str] = Field(default_factory=dict)
    evidence: Evidence = Evidence()
    last_good_checkpoint: Checkpoint | None = Field(
        default=None, description="the newest checkpoint that was written before the onset"
    )
    consequence_of: str | None = Field(
        default=None, max_length=64, description="the id of the issue that caused it"
    )


@EVENT_TYPES.register
class IssueOngoing(IssueFiring):
    """The condition still holds; sent at most once in the rule's `repeat`."""

    event_type: ClassVar[str] = "tocsin.issue.ongoing"
    state: ClassVar[IssueState] = "ongoing"


@EVENT_TYPES.register
class IssueResolved(IssueFiring):
    """The condition has been false for `resolve_after`."""

    event_type: ClassVar[str] = "tocsin.issue.resolved"
    state: ClassVar[IssueState] = "resolved"


Issue = IssueFiring
"""Any state of an issue (the later states derive from the first)."""
