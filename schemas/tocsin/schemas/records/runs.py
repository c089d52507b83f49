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
    """What each event of a run says: of which run, of which incarnation, from which rank."""

    run_id: RunId
    incarnation: Incarnation
    rank: Whole = Field(default=0, description="0 for a launcher too")
    world_size: Positive = Field(default=1, description="how many ranks train together")
    role: Role = Field(default="trainer", description="who speaks: the launcher, or a rank")


class Group(Model):
    """One parameter group of the primary optimizer."""

    index: Whole
    parameters: Whole
    lr: Real | None = Field(default=None, description="None: it cannot be read")
    initial_lr: Real | None = Field(
        default=None, description="base rate of a learning-rate schedule; None: none was declared"
    )


class SchedulerJob(Model):
    """What the scheduler calls the job that a training runs in: enough to end exactly this one."""

    kind: Word = Field(
        max_length=32, description="slurm, kubernetes, sagemaker, batch, ray, or a kind of your own"
    )
    names: Mapped[Annotated[Word, Field(max_length=MAX_SCHEDULER_NAME)]] = Field(
        default_factory=dict,
        description="ids as the scheduler gave them: job, restarts, namespace, pod_uid, …",
    )


@EVENT_TYPES.register
class RunStarted(RunData):
    """A launcher has started a job, or a rank has begun to train."""

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
        default=None, description="the scheduler's own names for the job; None outside of one"
    )
    restart_count: Whole = Field(
        default=0,
        description="how often torchelastic has restarted the job, and 1,000 for each requeue",
    )
    training: Whole = Field(default=0, description="which training of this job it is, from 0")
    labels: Labels = Field(default_factory=dict)
    node: Word = Field(default="", max_length=255, description="host name")
    pid: Whole = 0
    command: Text = Field(default="", description="secrets masked")
    folder: Text = ""
    git_commit: str | None = Field(default=None, max_length=64)
    versions: Mapped[Word] = Field(default_factory=dict, description="python, torch, tocsin, …")
    optimizer: str | None = Field(default=None, max_length=200)
    optimizers: Whole = Field(default=0, description="how many optimizers step in this training")
    groups: Many[Group] = ()
    tensors: Whole = Field(default=0, description="trainable parameter tensors")
    parameters: Whole = Field(default=0, description="trainable numbers")
    collections: Many[str] = Field(default=(), description="what is captured")
    heartbeat_s: float = Field(
        default=10.0, gt=0, description="interval of this origin's heartbeats, seconds"
    )
    after_stop: Text = Field(
        default="", description="why the incarnation before was stopped; empty: it was not"
    )
    stop: Literal["trusted_key", "no_trusted_key", "off"] = Field(
        default="off", description="whether a stop would be obeyed"
    )
    devices: Mapped[Positive] = Field(
        default_factory=dict,
        description="accelerators that this rank trains on: name -> how many; none on a CPU",
    )
    loaded: Many[Text] = Field(
        default=(), description="the last files that were loaded before the first step, by torch"
    )
    environment: bool = Field(
        default=False,
        description="whether the model acts in an environment (reinforcement learning) and learns "
        "from what happens there: its loss does not measure progress",
    )
    ends_by_ms: Millis | None = Field(
        default=None, description="when the scheduler ends the job; None: not known"
    )


@EVENT_TYPES.register
class RunEnded(RunData):
    """A rank has finished, or a launcher's job has ended; only states of a stop may follow."""

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
    """What watching has cost one rank so far, and what it sent."""

    overhead_percent: float = Field(
        ge=0, description="CPU time in hooks against time of the steps, the first two left out"
    )
    spent_s: float = Field(
        default=0.0, ge=0, description="CPU time in hooks so far, seconds, the first steps included"
    )
    stepping_s: float = Field(
        default=0.0, ge=0, description="time of the steps that overhead_percent is a share of, s"
    )
    step_s: float | None = Field(default=None, ge=0, description="mean time of a step, seconds")
    budget_percent: float | None = Field(
        default=None, ge=0, description="what the step time's share may be: capture.budget"
    )
    intervals: Mapped[Positive] = Field(
        default_factory=dict, description="collection -> steps between two summaries, in force"
    )
    records: Whole = Field(description="records acknowledged by the bus")
    dropped: Whole = Field(description="records dropped because the queue was full or the bus away")
    skipped_tensors: Whole = Field(
        default=0, description="times a tensor could not be read: on meta, quantised, …"
    )
    degraded: Many[Word] = Field(
        default=(), description="probes that were switched off, with the reason"
    )
    not_watched: Many[Word] = Field(
        default=(), description="those of them that are off now; the others are back"
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
    """This origin is alive. Sent by a thread of its own, so it goes on while a step does not."""

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
        default=False, description="a forward call came since the last step"
    )
    busy: str | None = Field(
        default=None,
        max_length=100,
        description="the phase under way, where one is: evaluation, checkpoint",
    )
    forward_calls: Whole = Field(default=0, description="forward calls of the root module so far")
    capture: CaptureFigures | None = None


@EVENT_TYPES.register
class PhaseMark(RunData):
    """A phase began or ended: `run.phase(name)`, an evaluation, a checkpoint."""

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
    duration_s: float | None = Field(default=None, ge=0, description="seconds; at the end only")


@EVENT_TYPES.register
class DataLoaderSeen(RunData):
    """A training or an evaluation takes its batches from this data loader; said once of each."""

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
    workers: Whole = Field(description="worker processes; 0: the training process loads itself")
    pin_memory: bool = Field(default=False, description="in force; never without an accelerator")
    prefetch_factor: Whole | None = Field(
        default=None, description="batches that each worker loads ahead; None without workers"
    )
    persistent_workers: bool = False
    batch_size: Whole | None = Field(
        default=None, description="samples of a batch; None: it varies or is not known"
    )
    dataset: Word = Field(default="", max_length=200, description="class of the data set")
    iterable: bool = Field(default=False, description="a stream: it has no length")
    samples: Whole | None = Field(default=None, description="of the data set, on all ranks")
    cores: Whole | None = Field(default=None, description="CPUs that the process may use")
    gpu: bool = Field(default=False, description="whether the process sees a CUDA device")
    step: Step | None = Field(default=None, description="last finished step when it was recorded")


@EVENT_TYPES.register
class CaptureDegraded(RunData):
    """A probe was switched off: it failed or cost too much. The training goes on unharmed."""

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
