"""Issues: what a rule has found, where it began, and how it went on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event, Model, example
from tocsin.schemas.records.fields import (
    Id,
    Labels,
    Many,
    Millis,
    Positive,
    Step,
    Text,
    Whole,
    Word,
)
from tocsin.schemas.records.real import Real
from tocsin.schemas.records.runs import RunData

Severity = Literal["info", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")
"""From the least to the most severe."""
SHORT_ID: Final = 8
"""Characters of an issue's id that tell it from the others of a bus, in practice."""

IssueState = Literal["firing", "ongoing", "resolved"]
SubjectKind = Literal[
    "tensor", "layer", "loss", "scalar", "learning_rate", "rank", "device", "node", "rule", "run"
]


class Subject(Model):
    """What the issue is about: `gradients/blocks.3.attention.qkv.weight`, `loss`, `rank 1`, …"""

    kind: SubjectKind = Field(description="kind of subject")
    name: Word = Field(
        max_length=512,
        examples=["blocks.3.attention.qkv.weight"],
        description="its name in the training",
    )
    collection: str | None = Field(
        default=None, max_length=64, description="for a tensor: the collection it was captured in"
    )


class Fact(Model):
    """One number or word of the evidence, for example `nans` 12, or `ratio` 41.2 with limit 20."""

    name: str = Field(max_length=100, description="what was measured")
    value: Real | Text = Field(description="a number or a word")
    limit: Real | None = Field(
        default=None, description="the limit that the value was compared with"
    )
    unit: str | None = Field(
        default=None,
        max_length=32,
        examples=["percent"],
        description="unit of the value and the limit",
    )


class Series(Model):
    """The deciding series: the last points up to the firing step, and the limit crossed."""

    name: Word = Field(max_length=200, examples=["loss"], description="what was measured")
    unit: str | None = Field(
        default=None,
        max_length=32,
        examples=["percent"],
        description="unit of the values and the limit",
    )
    steps: Many[Step] = Field(
        max_length=512, description="the step of each value; seconds if `x` is `s`"
    )
    x: Literal["s"] | None = Field(
        default=None,
        description="`s`: `steps` contains seconds since the first sample; None: it contains steps",
    )
    values: Many[Real] = Field(max_length=512, description="one value for each step")
    limit: Real | None = Field(default=None, description="the limit that was crossed")

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if len(self.steps) != len(self.values):
            raise ValueError(f"{len(self.steps)} steps, but {len(self.values)} values")
        return self


class Evidence(Model):
    """The numbers behind a finding."""

    facts: Many[Fact] = Field(default=(), max_length=64, description="the numbers that decided")
    series: Series | None = Field(default=None, description="the series of the number that decided")
    followed: Whole = Field(default=0, description="how many more tensors or ranks are affected")
    also: Many[Word] = Field(
        default=(), max_length=32, description="names of the next affected tensors or ranks"
    )
    explanation: Text = Field(default="", description="how the origin was determined")
    cause: Text = Field(
        default="", description="why it is a consequence of another issue, if it is one"
    )


class Origin(Model):
    """The first start of an issue that has recurred since."""

    step: Step | None = Field(default=None, description="the first step")
    rank: Whole | None = Field(default=None, description="the first rank")
    onset_ms: Millis = Field(default=0, description="append time of the record that started it")


@EVENT_TYPES.register
class IssueFiring(RunData):
    """An issue in one of its states. All states have the same id, also if the issue fires again
    because its condition has recurred soon.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rank=1,
        issue_id="b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        rule="nonfinite",
        use="nonfinite",
        rule_version=1,
        severity="critical",
        stop_worthy=True,
        subject={
            "kind": "tensor",
            "name": "blocks.3.attention.qkv.weight",
            "collection": "gradients",
        },
        reason="NaN in 12 of 1,769,472 gradients of blocks.3.attention.qkv.weight on rank 1",
        first_step=1200,
        first_rank=1,
        step=1200,
        onset_ms=1795258012250,
        at_ms=1795258012250,
        evidence={
            "facts": [{"name": "nans", "value": 12.0}],
            "series": {"name": "loss", "steps": [1199, 1200], "values": [2.75, "NaN"]},
        },
    )

    event_type: ClassVar[str] = "tocsin.issue.firing"
    state: ClassVar[IssueState] = "firing"

    issue_id: Id = Field(
        description="computed from the data: the same in every state, process and replay"
    )
    rule: str = Field(max_length=100, description="name of the rule instance")
    use: str = Field(max_length=100, description="name of the rule in the catalogue")
    rule_version: Positive = Field(description="version of the rule in the catalogue")
    branch: str = Field(
        default="",
        max_length=64,
        description="which of the rule's conditions was met, if it has several",
    )
    severity: Severity = Field(
        description="severity of this state; in a list of issues: the highest so far"
    )
    stop_worthy: bool = Field(
        default=False, description="whether the issue may stop the run by default"
    )
    rule_may_stop: bool | None = Field(
        default=None,
        description=(
            "whether the rule can stop runs by default; if true or unknown, `stop` in its action "
            "list applies only to stop-worthy issues"
        ),
    )
    stop_held: bool = Field(
        default=False,
        description=(
            "stops for this issue are held back: the rule started without its earlier state of the "
            "run"
        ),
    )
    times: Positive = Field(
        default=1, description="how many times the condition has occurred; an issue may fire again"
    )
    muted: bool = Field(
        default=False,
        description=(
            "no receiver is notified of this state, because a notification was sent a moment ago "
            "or the rule has sent too many in this run; stops are not affected"
        ),
    )
    last_notice: bool = Field(
        default=False,
        description="the last notification that the rule sends for this severity in this run",
    )
    peak_severity: Severity | None = Field(
        default=None,
        description="the highest severity so far, if higher than `severity`",
    )
    origin: Origin | None = Field(
        default=None,
        description="where the issue first started, if its condition has recurred since",
    )
    subject: Subject = Field(description="what the issue is about")
    reason: Text = Field(description="one sentence: what happened, where first, how bad it is")
    remedy: Text = Field(default="", description="what to try")
    first_step: Step | None = Field(default=None, description="the step at which it started")
    first_rank: Whole | None = Field(default=None, description="the rank on which it started")
    step: Step | None = Field(
        default=None, description="the run's step when this state was decided"
    )
    onset_ms: Millis = Field(
        default=0, description="append time of the record that started it, Unix milliseconds"
    )
    at_ms: Millis = Field(
        default=0,
        description="append time of the record that decided this state, Unix milliseconds",
    )
    labels: Labels = Field(default_factory=dict, description="labels of the run")
    evidence: Evidence = Field(default=Evidence(), description="the numbers behind the decision")
    last_good_checkpoint: Checkpoint | None = Field(
        default=None, description="the newest checkpoint that was written before the onset"
    )
    consequence_of: Id | None = Field(
        default=None, description="the id of the issue that caused it"
    )

    @property
    def short_id(self) -> str:
        """The first characters of the id: what people are shown and `tocsin why` takes."""
        return self.issue_id[:SHORT_ID]

    @property
    def turned_critical(self) -> bool:
        """Whether it was less severe until now: people are notified, as of one that fires."""
        return False

    def overall(self) -> Self:
        """The issue over all its times: its highest severity, and where it first began.

        For readers that keep one record of an issue, the newest.
        """
        update: dict[str, object] = {}
        if self.peak_severity is not None:
            update["severity"] = self.peak_severity
        if self.origin is not None:
            update["first_step"], update["first_rank"] = self.origin.step, self.origin.rank
            update["onset_ms"] = self.origin.onset_ms
        return self.model_copy(update=update) if update else self


@EVENT_TYPES.register
class IssueOngoing(IssueFiring):
    """The condition is still true. Sent at most once in the rule's `repeat`, or if the severity
    rises.
    """

    event_type: ClassVar[str] = "tocsin.issue.ongoing"
    state: ClassVar[IssueState] = "ongoing"

    raised_from: Severity | None = Field(
        default=None,
        description="the previous severity, if it has risen or the issue has become stop-worthy",
    )
    stop_released: bool = Field(
        default=False,
        description="the rule has seen enough of the run: stops are no longer held back",
    )

    @property
    def turned_critical(self) -> bool:
        return self.raised_from is not None and self.severity == "critical"


@EVENT_TYPES.register
class IssueResolved(IssueFiring):
    """The condition has been false for `resolve_after`."""

    event_type: ClassVar[str] = "tocsin.issue.resolved"
    state: ClassVar[IssueState] = "resolved"


def issue_event(issue: IssueFiring, *, event_id: str, time_ms: int) -> Event[Data]:
    """A state of an issue as the event that its rule publishes."""
    return Event.wrap(
        issue,
        id=event_id,
        source=f"/runs/{issue.run_id}/rules/{issue.rule}",
        time_ms=time_ms,
        subject=issue.subject.name[:400],
    )


def gravest(issues: Sequence[IssueFiring]) -> IssueFiring | None:
    """The first critical one, else the first warning, else the first; None if there is none.

    Where that follows from another of these, the first cause.
    """
    if not issues:
        return None
    issue = next(
        (i for severity in ("critical", "warning") for i in issues if i.severity == severity),
        issues[0],
    )
    return root_of(issue, issues)


def root_of(issue: IssueFiring, issues: Iterable[IssueFiring]) -> IssueFiring:
    """The first cause of an issue, as far as it is among these; the issue itself if none is."""
    known = {one.issue_id: one for one in issues}
    while (cause := known.pop(issue.consequence_of or "", None)) is not None:
        issue = cause
    return issue


Issue = IssueFiring
"""Any state of an issue (the later states derive from the first)."""
