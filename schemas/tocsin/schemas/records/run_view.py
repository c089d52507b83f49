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
    """The newest state of one rank."""

    rank: Whole = Field(description="rank number, from 0")
    last_step: Step | None = Field(default=None, description="the last finished step")
    last_heard_ms: Millis = Field(description="append time of its last record")
    ended: bool = Field(default=False, description="whether the rank has finished")
    capture: CaptureFigures | None = Field(
        default=None, description="the cost of capture on this rank"
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
    """The progress of a stop of this incarnation."""

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
    command_id: Id = Field(description="the command that requested it")
    issue_id: Id | None = Field(
        default=None, description="the issue that caused it; None: a person requested it"
    )
    reason: Text = Field(default="", description="the answer of the job")
    step: Step | None = Field(default=None, description="the step at which the ranks exited")
    how: str | None = Field(
        default=None, description="edge (the ranks exited between steps), SIGTERM or SIGKILL"
    )
    exit_code: ExitCode | None = Field(
        default=None, description="exit code of the job; None if it is running or not known"
    )
    decision: str = Field(
        default="",
        max_length=32,
        description="what happened to the checkpoint: saved, protected, …",
    )
    checkpoint: Checkpoint | None = Field(
        default=None, description="the checkpoint that was saved or protected"
    )
    states: Mapped[Millis] = Field(
        default_factory=dict, description="state -> append time, Unix milliseconds"
    )


@EVENT_TYPES.register
class RunView(RunData):
    """The current state of a run: the newest record of its key on the runs topic."""

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

    state: RunState = Field(description="lost: it stopped sending without reporting its end")
    labels: Labels = Field(default_factory=dict, description="the labels it was started with")
    scheduler: SchedulerJob | None = Field(
        default=None, description="the scheduler's names for the job; None outside a scheduler"
    )
    node: Word = Field(default="", description="host name of the launcher or of rank 0")
    command: Text = Field(default="", description="how it was started; secrets masked")
    started_ms: Millis = Field(default=0, description="start of this incarnation")
    ended_ms: Millis | None = Field(default=None, description="None while it runs")
    outcome: Outcome | None = Field(
        default=None, description="None while it runs, and if it is lost"
    )
    exit_code: ExitCode | None = Field(
        default=None, description="exit code of the job; None if not known"
    )
    last_step: Step | None = Field(
        default=None, description="the last step that any rank has finished"
    )
    last_loss: Real | None = Field(
        default=None, description="the loss at that step, or the last known loss before it"
    )
    ranks: Many[RankView] = Field(default=(), description="the newest state of each rank")
    telemetry: TelemetryCounts | None = Field(
        default=None, description="what is missing of the records, and of the ranks"
    )
    rules: Mapped[RuleStatus] = Field(
        default_factory=dict, description="rule instance -> its status"
    )
    issues: Whole = Field(default=0, description="number of issues so far, recurrences included")
    stop: StopView | None = Field(
        default=None, description="the progress of a stop; None: no stop was requested"
    )
    capture: CaptureFigures | None = Field(default=None, description="over all ranks")
    devices: Mapped[Positive] = Field(
        default_factory=dict, description="accelerators of all ranks: name -> how many"
    )
    goodput: Goodput | None = Field(
        default=None, description="where the time went, over all incarnations so far"
    )
    outlook: Outlook | None = Field(
        default=None, description="the planned steps, and how long a step takes"
    )
    next_offset: Whole = Field(default=0, description="the view covers telemetry below this offset")
