"""The life of a run, as its launcher and its ranks tell it, and the view of it that readers get."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tocsin.schemas.events import EVENT_TYPES, MAX_TEXT, Data, Model
from tocsin.schemas.real import Real

Role = Literal["launcher", "trainer"]
Outcome = Literal["completed", "failed", "stopped", "interrupted"]
RunState = Literal["running", "ended", "lost"]
RuleStatus = Literal[
    "waiting_for_input", "in_progress", "no_issues_found", "issues_found", "error", "stopped"
]


class RunData(Data):
    """What each event of a run says: of which run, of which incarnation, from which rank."""

    run_id: str = Field(max_length=200)
    incarnation: str = Field(max_length=64)
    rank: int = Field(default=0, ge=0, description="0 for a launcher too")
    world_size: int = Field(default=1, ge=1)
    role: Role = "trainer"


class Group(Model):
    """One parameter group of the primary optimizer."""

    index: int = Field(ge=0)
    parameters: int = Field(ge=0)
    lr: Real


@EVENT_TYPES.register
class RunStarted(RunData):
    """A launcher has started a job, or a rank has begun to train."""

    event_type: ClassVar[str] = "tocsin.run.started"

    job_id: str = Field(max_length=200)
    restart_count: int = Field(default=0, ge=0)
    training: int = Field(default=0, ge=0, description="which training of this job it is, from 0")
    labels: dict[str, str] = Field(default_factory=dict)
    node: str = Field(default="", max_length=255)
    pid: int = Field(default=0, ge=0)
    command: str = Field(default="", max_length=MAX_TEXT, description="secrets masked")
    folder: str = Field(default="", max_length=MAX_TEXT)
    git_commit: str | None = Field(default=None, max_length=64)
    versions: dict[str, str] = Field(default_factory=dict, description="python, torch, tocsin, …")
    optimizer: str | None = Field(default=None, max_length=200)
    optimizers: int = Field(
        default=0, ge=0, description="how many optimizers step in this training"
    )
    groups: tuple[Group, ...] = ()
    tensors: int = Field(default=0, ge=0, description="trainable parameter tensors")
    parameters: int = Field(default=0, ge=0, description="trainable numbers")
    collections: tuple[str, ...] = Field(default=(), description="what is captured")
    heartbeat_s: float = Field(
        default=10.0, gt=0, description="interval of this speaker's heartbeats, seconds"
    )
    stop: Literal["trusted_key", "no_trusted_key", "off"] = Field(
        default="off", description="whether a stop would be obeyed"
    )


@EVENT_TYPES.register
class RunEnded(RunData):
    """A rank has finished, or a launcher's job has ended; only states of a stop may follow."""

    event_type: ClassVar[str] = "tocsin.run.ended"

    outcome: Outcome
    exit_code: int | None = Field(
        default=None, description="launcher only; 128+n after signal n, 79 after a stop"
    )
    reason: str = Field(default="", max_length=MAX_TEXT)
    last_step: int | None = Field(default=None, ge=0)
    duration_s: float = Field(default=0.0, ge=0)
    capture: CaptureFigures | None = None


class CaptureFigures(Model):
    """What watching has cost one rank so far, and what it sent."""

    overhead_percent: float = Field(ge=0, description="time in hooks against time of the steps")
    records: int = Field(ge=0, description="records acknowledged by the bus")
    dropped: int = Field(
        ge=0, description="records dropped because the queue was full or the bus away"
    )
    degraded: tuple[str, ...] = Field(
        default=(), description="probes that were switched off, with the reason"
    )


@EVENT_TYPES.register
class Heartbeat(RunData):
    """The speaker lives. Sent by a thread of its own, so it goes on while a step does not."""

    event_type: ClassVar[str] = "tocsin.run.heartbeat"

    last_step: int | None = Field(default=None, ge=0, description="None before the first step")
    steps_in_flight: bool = Field(
        default=False, description="a forward call came since the last step"
    )
    busy: str | None = Field(
        default=None,
        max_length=100,
        description="the phase under way, where one is: evaluation, checkpoint",
    )
    forward_calls: int = Field(
        default=0, ge=0, description="forward calls of the root module so far"
    )
    capture: CaptureFigures | None = None


@EVENT_TYPES.register
class PhaseMark(RunData):
    """A phase began or ended: `run.phase(name)`, an evaluation, a checkpoint."""

    event_type: ClassVar[str] = "tocsin.run.phase"

    name: str = Field(max_length=100)
    edge: Literal["begin", "end"]
    step: int | None = Field(default=None, ge=0)
    duration_s: float | None = Field(default=None, ge=0, description="at the end only")


class Checkpoint(Model):
    """A checkpoint file that a run has written."""

    path: str = Field(max_length=MAX_TEXT)
    step: int = Field(
        ge=0, description="steps finished when it was written began minus one: the last step in it"
    )
    size_bytes: int | None = Field(default=None, ge=0)
    finite: bool | None = Field(
        default=None, description="whether what was saved was finite, where known"
    )


@EVENT_TYPES.register
class CheckpointWritten(RunData):
    """`torch.save` has written a file."""

    event_type: ClassVar[str] = "tocsin.run.checkpoint"

    checkpoint: Checkpoint
    duration_s: float = Field(default=0.0, ge=0)


@EVENT_TYPES.register
class CaptureDegraded(RunData):
    """A probe was switched off: it failed or cost too much. The training goes on unharmed."""

    event_type: ClassVar[str] = "tocsin.run.capture_degraded"

    probe: str = Field(max_length=100)
    reason: str = Field(max_length=MAX_TEXT)
    step: int | None = Field(default=None, ge=0)


class RankView(Model):
    """One rank, as last heard of."""

    rank: int = Field(ge=0)
    last_step: int | None = None
    last_heard_ms: int = Field(ge=0, description="append time of its last record")
    ended: bool = False
    capture: CaptureFigures | None = None


class StopView(Model):
    """How far a stop of this incarnation has come."""

    state: Literal["requested", "acknowledged", "left", "exited", "escalated", "refused", "expired"]
    command_id: str
    issue_id: str | None = None
    reason: str = ""
    step: int | None = Field(default=None, description="the step at which the ranks left")
    how: str | None = Field(default=None, description="edge, SIGTERM or SIGKILL")
    exit_code: int | None = None
    states: dict[str, int] = Field(
        default_factory=dict, description="state -> append time, Unix milliseconds"
    )


@EVENT_TYPES.register
class RunView(RunData):
    """What a reader wants to know of a run: the newest of its key on the runs topic."""

    event_type: ClassVar[str] = "tocsin.run.view"

    state: RunState
    labels: dict[str, str] = Field(default_factory=dict)
    node: str = ""
    command: str = ""
    started_ms: int = Field(default=0, ge=0)
    ended_ms: int | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    last_step: int | None = None
    last_loss: Real | None = None
    ranks: tuple[RankView, ...] = ()
    rules: dict[str, RuleStatus] = Field(default_factory=dict)
    issues: int = Field(default=0, ge=0, description="episodes so far")
    stop: StopView | None = None
    capture: CaptureFigures | None = Field(default=None, description="over all ranks")
    next_offset: int = Field(default=0, ge=0, description="telemetry up to here is in this view")


RunEnded.model_rebuild()
