"""The life of a run, as its launcher and its ranks report it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, Model, example
from tocsin.schemas.records.fields import (
    ExitCode,
    Incarnation,
    Labels,
    Many,
    Mapped,
    Millis,
    Positive,
    RunId,
    Step,
    Text,
    Whole,
    Word,
)
from tocsin.schemas.records.real import Real

Role = Literal["launcher", "trainer"]
Outcome = Literal["completed", "failed", "stopped", "interrupted"]


MAX_SCHEDULER_NAME: Final = 500
"""Characters of a name that a scheduler gave."""


class RunData(Data):
    """The fields of every event of a run: the run, the incarnation and the rank."""

    run_id: RunId
    incarnation: Incarnation
    rank: Whole = Field(default=0, description="0 for a launcher, too")
    world_size: Positive = Field(default=1, description="number of ranks that train together")
    role: Role = Field(default="trainer", description="the sender: the launcher, or a rank")


class Group(Model):
    """One parameter group of the primary optimizer."""

    index: Whole
    parameters: Whole
    lr: Real | None = Field(default=None, description="None if it cannot be read")
    initial_lr: Real | None = Field(
        default=None, description="base rate of a learning-rate schedule; None if none is declared"
    )


class SchedulerJob(Model):
    """The scheduler's names for the job that runs a training: enough to end exactly this job."""

    kind: Word = Field(
        max_length=32, description="slurm, kubernetes, sagemaker, batch, ray, or a custom kind"
    )
    names: Mapped[Annotated[Word, Field(max_length=MAX_SCHEDULER_NAME)]] = Field(
        default_factory=dict,
        description="ids from the scheduler: job, restarts, namespace, pod_uid, …",
    )


@EVENT_TYPES.register
class RunStarted(RunData):
    """A launcher has started a job, or a rank has started to train."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rank=1,
        world_size=2,
        job_id="slurm-4711",
        labels={"team": "vision"},
        node="node-17",
        pid=31337,
        command="python train.py --lr 3e-4",
        folder="/home/ana/gpt",
        git_commit="9df90d1",
        versions={"python": "3.11.9", "torch": "2.15.0"},
        optimizer="AdamW",
        optimizers=1,
        groups=[{"index": 0, "parameters": 148, "lr": 0.0003}],
        tensors=148,
        parameters=124439808,
        collections=["gradients", "weights"],
        heartbeat_s=10.0,
        stop="trusted_key",
    )

    event_type: ClassVar[str] = "tocsin.run.started"

    job_id: str = Field(max_length=200)
    scheduler: SchedulerJob | None = Field(
        default=None, description="the scheduler's names for the job; None outside a scheduler"
    )
    restart_count: Whole = Field(
        default=0,
        description="number of restarts by torchelastic, plus 1,000 for each requeue",
    )
    training: Whole = Field(default=0, description="number of this training within the job, from 0")
    labels: Labels = Field(default_factory=dict)
    node: Word = Field(default="", max_length=255, description="host name")
    pid: Whole = 0
    command: Text = Field(default="", description="secrets masked")
    folder: Text = ""
    git_commit: str | None = Field(default=None, max_length=64)
    versions: Mapped[Word] = Field(default_factory=dict, description="python, torch, tocsin, …")
    optimizer: str | None = Field(default=None, max_length=200)
    optimizers: Whole = Field(
        default=0, description="number of optimizers that step in this training"
    )
    groups: Many[Group] = ()
    tensors: Whole = Field(default=0, description="number of trainable parameter tensors")
    parameters: Whole = Field(default=0, description="number of trainable parameters")
    collections: Many[str] = Field(default=(), description="the collections that are captured")
    heartbeat_s: float = Field(
        default=10.0, gt=0, description="interval between heartbeats of this sender, seconds"
    )
    after_stop: Text = Field(
        default="", description="why the previous incarnation was stopped; empty if it was not"
    )
    stop: Literal["trusted_key", "no_trusted_key", "off"] = Field(
        default="off", description="whether this process obeys stops"
    )
    devices: Mapped[Positive] = Field(
        default_factory=dict,
        description="accelerators that this rank trains on: name -> how many; none on a CPU",
    )
    loaded: Many[Text] = Field(
        default=(), description="the last files that torch loaded before the first step"
    )
    environment: bool = Field(
        default=False,
        description=(
            "whether the model acts in an environment (reinforcement learning) and learns from the "
            "outcome: its loss does not measure progress"
        ),
    )
    ends_by_ms: Millis | None = Field(
        default=None, description="when the scheduler ends the job; None if not known"
    )


@EVENT_TYPES.register
class RunEnded(RunData):
    """A rank has finished, or a launcher's job has ended. Only states of a stop may follow."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        role="launcher",
        outcome="stopped",
        exit_code=79,
        reason="stopped for nonfinite",
        last_step=1203,
        duration_s=412.5,
    )

    event_type: ClassVar[str] = "tocsin.run.ended"

    outcome: Outcome
    exit_code: ExitCode | None = Field(
        default=None, description="launcher only; 128+n after signal n, 79 after a stop"
    )
    reason: Text = ""
    last_step: Step | None = None
    duration_s: float = Field(default=0.0, ge=0, description="seconds")
    capture: CaptureFigures | None = None


SHORT_RUN_S: Final = 60.0
"""A share of less time than this would be that of imports and first looks."""


class CaptureFigures(Model):
    """The cost of capture on one rank so far, and how much it sent."""

    overhead_percent: float = Field(
        ge=0,
        description=(
            "CPU time in hooks as a share of the time of the steps, without the first two steps"
        ),
    )
    spent_s: float = Field(
        default=0.0, ge=0, description="CPU time in hooks so far, first steps included, seconds"
    )
    stepping_s: float = Field(
        default=0.0, ge=0, description="time of the steps that overhead_percent refers to, seconds"
    )
    step_s: float | None = Field(default=None, ge=0, description="mean time of a step, seconds")
    budget_percent: float | None = Field(
        default=None, ge=0, description="highest permitted share of the step time: capture.budget"
    )
    intervals: Mapped[Positive] = Field(
        default_factory=dict, description="collection -> current number of steps between summaries"
    )
    records: Whole = Field(description="records acknowledged by the bus")
    dropped: Whole = Field(
        description="records dropped because the queue was full or the bus unavailable"
    )
    skipped_tensors: Whole = Field(
        default=0, description="how often a tensor could not be read: on meta, quantised, …"
    )
    degraded: Many[Word] = Field(
        default=(), description="probes that were switched off, each with the reason"
    )
    not_watched: Many[Word] = Field(
        default=(), description="those of them that are off now; the others are on again"
    )

    @property
    def is_short(self) -> bool:
        """Whether the steps took too little time for a share of it to mean anything."""
        return 0 < self.stepping_s < SHORT_RUN_S

    @property
    def overhead_text(self) -> str:
        """What watching has cost, for people: `0.3 %`; of a short run `0.4 s`."""
        return f"{self.spent_s:.1f} s" if self.is_short else f"{self.overhead_percent:.1f} %"

    @classmethod
    def joined(cls, figures: Iterable[Self]) -> Self | None:
        """The figures of several ranks or trainings together: the highest cost and the longest
        intervals, the sums of the records. None of none."""
        each = list(figures)
        if not each:
            return None
        budgets = [one.budget_percent for one in each if one.budget_percent is not None]
        names = dict.fromkeys(name for one in each for name in one.intervals)
        return cls(
            overhead_percent=max(one.overhead_percent for one in each),
            spent_s=max(one.spent_s for one in each),
            stepping_s=max(one.stepping_s for one in each),
            step_s=max((one.step_s for one in each if one.step_s is not None), default=None),
            budget_percent=max(budgets, default=None),
            intervals={name: max(one.intervals.get(name, 1) for one in each) for name in names},
            records=sum(one.records for one in each),
            dropped=sum(one.dropped for one in each),
            skipped_tensors=sum(one.skipped_tensors for one in each),
            degraded=tuple(dict.fromkeys(text for one in each for text in one.degraded))[:64],
            not_watched=tuple(dict.fromkeys(name for one in each for name in one.not_watched))[:64],
        )


@EVENT_TYPES.register
class Heartbeat(RunData):
    """The sender is alive. A separate thread sends it, so it continues while a step does not."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        last_step=1200,
        steps_in_flight=True,
        forward_calls=1202,
        capture={"overhead_percent": 0.3, "records": 2411, "dropped": 0},
    )

    event_type: ClassVar[str] = "tocsin.run.heartbeat"

    last_step: Step | None = Field(default=None, description="None before the first step")
    steps_in_flight: bool = Field(
        default=False, description="there was a forward call since the last step"
    )
    busy: str | None = Field(
        default=None,
        max_length=100,
        description="the current phase, if there is one: evaluation, checkpoint",
    )
    forward_calls: Whole = Field(
        default=0, description="number of forward calls of the root module so far"
    )
    capture: CaptureFigures | None = None


@EVENT_TYPES.register
class PhaseMark(RunData):
    """A phase started or ended: `run.phase(name)`, an evaluation, a checkpoint."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        name="evaluation",
        edge="end",
        step=1000,
        duration_s=12.25,
    )

    event_type: ClassVar[str] = "tocsin.run.phase"

    name: Word = Field(max_length=100)
    edge: Literal["begin", "end"]
    step: Step | None = None
    duration_s: float | None = Field(default=None, ge=0, description="seconds; only at the end")


@EVENT_TYPES.register
class DataLoaderSeen(RunData):
    """A training or an evaluation uses this data loader. Sent once for each loader."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rank=1,
        world_size=2,
        mode="train",
        workers=4,
        pin_memory=True,
        prefetch_factor=2,
        batch_size=64,
        dataset="ImageFolder",
        samples=1281167,
        cores=32,
        gpu=True,
        step=0,
    )

    event_type: ClassVar[str] = "tocsin.run.data_loader"

    mode: Literal["train", "eval"]
    workers: Whole = Field(
        description="number of worker processes; 0: the training process loads the data"
    )
    pin_memory: bool = Field(
        default=False, description="whether pinned memory is in use; never without an accelerator"
    )
    prefetch_factor: Whole | None = Field(
        default=None, description="batches that each worker loads in advance; None without workers"
    )
    persistent_workers: bool = False
    batch_size: Whole | None = Field(
        default=None, description="samples per batch; None if it varies or is not known"
    )
    dataset: Word = Field(default="", max_length=200, description="class of the data set")
    iterable: bool = Field(
        default=False, description="whether the data set is a stream without a length"
    )
    samples: Whole | None = Field(
        default=None, description="samples in the data set, over all ranks"
    )
    cores: Whole | None = Field(default=None, description="number of CPUs that the process may use")
    gpu: bool = Field(default=False, description="whether the process sees a CUDA device")
    step: Step | None = Field(default=None, description="last finished step when it was recorded")


@EVENT_TYPES.register
class CaptureDegraded(RunData):
    """A probe was switched off, because it failed or cost too much. The training is unaffected."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        probe="weights",
        reason="over the budget of 0.5 % for 100 steps",
        step=400,
    )

    event_type: ClassVar[str] = "tocsin.run.capture_degraded"

    probe: str = Field(max_length=100)
    reason: Text
    step: Step | None = None


RunEnded.model_rebuild()
