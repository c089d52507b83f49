"""The view of a run that its readers get: the newest of its key on the runs topic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import EVENT_TYPES, Model, example
from tocsin.schemas.records.fields import (
    ExitCode,
    Id,
    Labels,
    Many,
    Mapped,
    Millis,
    Positive,
    Step,
    Text,
    Whole,
    Word,
)
from tocsin.schemas.records.goodput import Goodput, Outlook
from tocsin.schemas.records.real import Real
from tocsin.schemas.records.runs import (
    CaptureFigures,
    Outcome,
    RunData,
    SchedulerJob,
)

RunState = Literal["running", "ended", "lost"]
RuleStatus = Literal[
    "waiting_for_input", "in_progress", "no_issues_found", "issues_found", "error", "stopped"
]


class RankView(Model):
    """One rank, as last heard of."""

    rank: Whole = Field(description="its number, from 0")
    last_step: Step | None = Field(default=None, description="the last step that it finished")
    last_heard_ms: Millis = Field(description="append time of its last record")
    ended: bool = Field(default=False, description="whether it has finished")
    capture: CaptureFigures | None = Field(
        default=None, description="what watching has cost this rank"
    )


class TelemetryCounts(Model):
    """What is missing of the telemetry of an incarnation."""

    records_missing: Whole = Field(default=0, description="sent, and never received")
    records_repeated: Whole = Field(default=0, description="received more than once")
    records_late: Whole = Field(default=0, description="of an earlier incarnation")
    ranks_missing: Whole = Field(default=0, description="ranks that have sent nothing yet")
    ranks_late: Whole = Field(
        default=0, description="ranks so far behind that rules over all ranks leave them out"
    )


class StopView(Model):
    """How far a stop of this incarnation has come."""

    state: Literal[
        "requested",
        "acknowledged",
        "checkpoint_decided",
        "left",
        "exited",
        "escalated",
        "refused",
        "expired",
    ] = Field(description="the newest state of the stop")
    command_id: Id = Field(description="the command that asked for it")
    issue_id: Id | None = Field(
        default=None, description="the issue it is for; None: a person asked"
    )
    reason: Text = Field(default="", description="what the job answered")
    step: Step | None = Field(default=None, description="the step at which the ranks left")
    how: str | None = Field(default=None, description="edge, SIGTERM or SIGKILL")
    exit_code: ExitCode | None = Field(
        default=None, description="of the job; None: it runs, or it is not known"
    )
    decision: str = Field(
        default="", max_length=32, description="of its checkpoint: saved, protected, …"
    )
    checkpoint: Checkpoint | None = Field(
        default=None, description="the one that was saved or protected"
    )
    states: Mapped[Millis] = Field(
        default_factory=dict, description="state -> append time, Unix milliseconds"
    )


@EVENT_TYPES.register
class RunView(RunData):
    """What a reader wants to know of a run: the newest of its key on the runs topic."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        state="running",
        node="node-17",
        started_ms=1795257600000,
        last_step=1200,
        last_loss="NaN",
        ranks=[{"rank": 0, "last_step": 1200, "last_heard_ms": 1795258012500}],
        rules={"nonfinite": "issues_found"},
        issues=1,
        next_offset=48213,
    )

    event_type: ClassVar[str] = "tocsin.run.view"

    state: RunState = Field(description="lost: it stopped sending without an end")
    labels: Labels = Field(default_factory=dict, description="as it was started with")
    scheduler: SchedulerJob | None = Field(
        default=None, description="the scheduler's own names for the job; None outside of one"
    )
    node: Word = Field(default="", description="host name of the launcher or of rank 0")
    command: Text = Field(default="", description="how it was started; secrets masked")
    started_ms: Millis = Field(default=0, description="start of this incarnation")
    ended_ms: Millis | None = Field(default=None, description="None while it runs")
    outcome: Outcome | None = Field(
        default=None, description="None while it runs, and if it is lost"
    )
    exit_code: ExitCode | None = Field(default=None, description="of the job; None: not known")
    last_step: Step | None = Field(default=None, description="the last step that any rank finished")
    last_loss: Real | None = Field(
        default=None, description="the loss of that step, or the last before it"
    )
    ranks: Many[RankView] = Field(default=(), description="each rank, as last heard of")
    telemetry: TelemetryCounts | None = Field(
        default=None, description="what is missing of the records, and of the ranks"
    )
    rules: Mapped[RuleStatus] = Field(
        default_factory=dict, description="rule instance -> how it stands"
    )
    issues: Whole = Field(default=0, description="episodes so far")
    stop: StopView | None = Field(
        default=None, description="how far a stop has come; None: none was requested"
    )
    capture: CaptureFigures | None = Field(default=None, description="over all ranks")
    devices: Mapped[Positive] = Field(
        default_factory=dict, description="accelerators of all ranks: name -> how many"
    )
    goodput: Goodput | None = Field(
        default=None, description="where the time went, over all incarnations so far"
    )
    outlook: Outlook | None = Field(
        default=None, description="what is planned, and how long a step takes"
    )
    next_offset: Whole = Field(default=0, description="telemetry up to here is in this view")
