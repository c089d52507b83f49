"""What the engine knows of one run: who speaks, how far each rank is, checkpoints, its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import Field

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.checkpoints import (
    VERIFIED_STEPS,
    Checkpoint,
    CheckpointRead,
    CheckpointWritten,
)
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.fields import MAX_ENTRIES
from tocsin.schemas.records.frames import Frame, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.goodput import Goodput, Outlook
from tocsin.schemas.records.program_facts import OptimizersSeen, TrainingPlanned
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.runs import (
    CaptureFigures,
    Heartbeat,
    Outcome,
    RunData,
    RunEnded,
    RunStarted,
    SchedulerJob,
)
from tocsin.schemas.records.stops.commands import StopAnswer
from tocsin.schemas.records.stops.progress import answered
from tocsin.schemas.records.wire import Meta
from tocsin.stream_rules.engine.causes import Causes
from tocsin.stream_rules.reading.goodput_ledger import GoodputLedger
from tocsin.stream_rules.reading.rank_parts import Parts
from tocsin.stream_rules.reading.restarts import FAILED, Fault, Restarts
from tocsin.stream_rules.reading.shedding import Shedding

QUIET_MS: Final = 60_000
"""A run of which nothing is heard for that long is lost."""

MAX_RANKS: Final = 16_384
"""Ranks of a run; a record of a higher one is set aside. Each costs every rule that asks for all of
them, and room in the run's saved state."""

MAX_COLLECTIONS: Final = 256
"""Names of collections that are remembered of a run."""

_PAST: Final = 64
_CHECKPOINTS: Final = 64
_BOOTS: Final = 10_000
_WORST: Final[tuple[Outcome, ...]] = ("failed", "stopped", "interrupted", "completed")

Value = Frame | Event[Data]
Standing = Literal["current", "late", "new"]


@dataclass(slots=True)
class RankState:
    """One rank, as last heard of."""

    last_step: int | None = None
    last_heard_ms: int = 0
    heartbeat_ms: int = 10_000
    outcome: Outcome | None = None
    capture: CaptureFigures | None = None
    devices: dict[str, int] = field(default_factory=dict)

    def reported(self, step: int) -> bool:
        """Whether nothing of that step is still to come."""
        return self.outcome is not None or (self.last_step is not None and self.last_step >= step)


@dataclass(slots=True)
class LauncherState:
    """The launcher, as last heard of."""

    boot: str
    heard_ms: int


@dataclass(slots=True)
class RunState:
    """State of one run in its newest incarnation. Implements `RunFacts`."""

    run_id: str
    incarnation: str = ""
    past: list[str] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0
    missing: int = 0
    late: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    scheduler: SchedulerJob | None = None
    node: str = ""
    command: str = ""
    world_size: int = 1
    optimizers: int = 0
    trains: bool = False
    """Whether a rank has reported that it trains, and with how many optimizers."""
    losses: int = 0
    """How many of them step after a backward call of their own; 0 while unknown."""
    acts: bool = False
    """Whether the model of a rank acts in an environment."""
    collections: list[str] = field(default_factory=list)
    started_ms: int = 0
    heard_ms: int = 0
    ended_ms: int | None = None
    lost: bool = False
    outcome: Outcome | None = None
    exit_code: int | None = None
    last_loss: float | None = None
    launcher: LauncherState | None = None
    ranks: dict[int, RankState] = field(default_factory=dict)
    furthest: int | None = None
    """The last step of the rank that is furthest; None: no rank has made one, or it was saved by a
    release that did not keep it."""
    logged_only: bool = False
    """Whether all steps so far are those of scalars that the user has logged."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    stop: StopView | None = None
    looked_ms: int | None = None
    """When the run was last asked to capture more (record time)."""
    causes: Causes = field(default_factory=Causes)
    parts: Parts = field(default_factory=Parts)
    restarts: Restarts = field(default_factory=Restarts)
    goodput: GoodputLedger = field(default_factory=GoodputLedger)
    planned: Outlook = field(default_factory=Outlook)
    shedding: Shedding = field(default_factory=Shedding)
    postponed: str = ""
    """Why the run is read later than the others of its partition; empty: it is not."""
    lagging: Annotated[int, Field(exclude=True)] = field(default=0, init=False)
    """A rank that had not reported a step when this was asked last."""

    # -- records in ------------------------------------------------------------------------

    def admit(self, meta: Meta) -> bool:
        """Whether a record is new; counts repeats and gaps of its boot."""
        if not meta.boot:
            return True
        last = self.sequences.get(meta.boot)
        if last is not None and meta.seq <= last:
            self.duplicates += 1
            return False
        self.missing += meta.seq - 1 - (last if last is not None else -1)
        if last is None and len(self.sequences) >= 2 * _BOOTS:
            self.sequences = dict(list(self.sequences.items())[-_BOOTS:])
        self.sequences[meta.boot] = meta.seq
        return True

    def standing(self, value: Value, meta: Meta) -> Standing:
        """Whether a value belongs to the incarnation at hand, to an earlier, or begins a new one.

        Raises:
            MalformedRecord: it is of another run, or no telemetry.
        """
        run_id, incarnation, role = _identity(value)
        if role == "trainer" and _rank_of(value) >= MAX_RANKS:
            raise MalformedRecord(f"rank {_rank_of(value):,}: expected less than {MAX_RANKS:,}")
        if run_id != self.run_id:
            raise MalformedRecord(f"the key says run {self.run_id!r}, the value {run_id!r}")
        if role == "launcher" and not _starts(value):
            # A launcher outlives its trainings; which job it is of shows its boot.
            other = self.launcher is not None and self.launcher.boot != meta.boot
            return "late" if other else "current"
        if role == "node" or incarnation == self.incarnation:
            return "current"
        return "late" if incarnation in self.past else "new"

    def start(self, value: Value, meta: Meta, now_ms: int) -> None:
        """Forget the incarnation before: `value` is the first of a new one."""
        launched_here = self.launcher is not None and not _is_launcher(value)
        if self.ranks:
            # One of which only launchers spoke may be that of ranks to come: of a job on several
            # nodes each launcher begins one, and all ranks are in that of rank 0's.
            self.past = [*self.past, self.incarnation][-_PAST:]
        fresh = RunState(run_id=self.run_id, incarnation=_identity(value)[1], past=self.past)
        fresh.started_ms = now_ms
        fresh.looked_ms, fresh.postponed = self.looked_ms, self.postponed
        fresh.restarts = self.restarts
        if self.outcome == "completed":
            fresh.restarts = Restarts()
        elif self.ranks:
            fresh.restarts = self.restarts.after(self.checkpoints, self.incarnation, self.last_step)
        fresh.duplicates, fresh.missing, fresh.late = self.duplicates, self.missing, self.late
        if launched_here and self.launcher is not None:
            fresh.launcher, fresh.labels = self.launcher, self.labels
            fresh.node, fresh.command = self.node, self.command
            fresh.scheduler = self.scheduler
            fresh.started_ms = self.started_ms
            fresh.planned = Outlook(ends_by_ms=self.planned.ends_by_ms)
        fresh.goodput = self._next_accounts(fresh.incarnation, now_ms, same_job=launched_here)
        # A process that trains twice goes on counting.
        fresh.sequences = dict(list(self.sequences.items())[-_BOOTS:])
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def _next_accounts(self, incarnation: str, now_ms: int, *, same_job: bool) -> GoodputLedger:
        heard_ms = self.heard_ms if self.ended_ms is None else self.ended_ms
        if same_job and self.ranks:
            heard_ms = max(rank.last_heard_ms for rank in self.ranks.values())
        return self.goodput.next(
            incarnation,
            now_ms,
            until_ms=heard_ms,
            over=self.ended or self.lost,
            completed=self._completed,
            same_job=same_job,
        )

    def learn(self, value: Value, meta: Meta, now_ms: int) -> None:
        """Take in a value of the incarnation at hand."""
        self.heard_ms = now_ms
        self.lost = False
        if isinstance(value, StepFrame | Event):
            self.goodput.learn(value, now_ms)
        if isinstance(value, Event):
            if isinstance(value.data, RunData):
                self._learn_event(value.data, meta, now_ms)
            return
        if isinstance(value, SystemFrame):
            return
        rank = self._rank(value.origin.rank, now_ms)
        self.world_size = max(self.world_size, value.origin.world_size)
        if isinstance(value, TensorFrame):
            self.shedding.note_step(value.step)
        elif value.mode == "train" and value.steps.size and self._counts(value):
            step = int(value.steps.max())
            self.shedding.note_step(step)
            rank.last_step = step if rank.last_step is None else max(rank.last_step, step)
            known = self.last_step if self.furthest is None else self.furthest
            self.furthest = step if known is None else max(known, step)
            losses = value.column("loss")
            if losses is not None and self._is_lowest(value.origin.rank):
                self.last_loss = float(losses[-1])

    def _counts(self, frame: StepFrame) -> bool:
        """Whether the steps of a frame are the run's: those of logged scalars are as long as there
        are no others."""
        if frame.is_logged:
            self.logged_only = self.logged_only or self.last_step is None
            return self.logged_only
        if self.logged_only:
            self.logged_only, self.furthest, self.shedding = False, None, Shedding()
            for rank in self.ranks.values():
                rank.last_step = None
        return True

    def _is_lowest(self, rank: int) -> bool:
        # There may be thousands, and nearly always there is rank 0.
        return rank == 0 or (0 not in self.ranks and rank == min(self.ranks))

    def quiet_due_ms(self) -> int | None:
        """When the run is lost unless something is heard; None: it has ended, or is lost."""
        return None if self.ended or self.lost else self.heard_ms + QUIET_MS

    def went_quiet(self, now_ms: int) -> None:
        """Called when a run has sent nothing for `QUIET_MS`."""
        if self.ranks and all(rank.outcome for rank in self.ranks.values()):
            self._end(now_ms)
        else:
            self.lost = True

    # -- what rules may ask ----------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.ended_ms is not None

    @property
    def one_loss(self) -> bool | None:
        """Whether all optimizers step after the same backward call; None: not known."""
        if self.losses:
            return self.losses == 1
        # A state that was saved before `trains` existed still has its optimizers.
        return self.optimizers <= 1 if self.trains or self.optimizers else None

    @property
    def last_step(self) -> int | None:
        if self.furthest is not None:
            # Each rule asks, at each record of each rank.
            return self.furthest
        return max(
            (r.last_step for r in self.ranks.values() if r.last_step is not None), default=None
        )

    @property
    def accounts(self) -> Goodput | None:
        """Where the time of the run went so far, over all its incarnations."""
        until_ms = self.heard_ms if self.ended_ms is None else self.ended_ms
        over = self.ended or self.lost
        return self.goodput.goodput(until_ms, over=over, completed=self._completed)

    @property
    def outlook(self) -> Outlook:
        """What the incarnation at hand has planned, and what a step takes."""
        return self.planned.model_copy(update={"step_s": self.goodput.step_s()})

    @property
    def devices(self) -> dict[str, int]:
        """The accelerators of all ranks: name -> how many."""
        found: Counter[str] = Counter()
        for rank in self.ranks.values():
            found.update(rank.devices)
        return dict(found.most_common(MAX_ENTRIES))

    @property
    def _completed(self) -> bool:
        if self.outcome is not None:
            return self.outcome == "completed"
        return bool(self.ranks) and all(r.outcome == "completed" for r in self.ranks.values())

    @property
    def leaving(self) -> bool:
        """Whether a rank has left its loop for a stop: no step will follow."""
        return self.stop is not None and "left" in self.stop.states

    @property
    def fault(self) -> Fault | None:
        return self.restarts.fault

    def live_ranks(self) -> Collection[int]:
        return [number for number, rank in self.ranks.items() if rank.outcome is None]

    def rank_last_step(self, rank: int) -> int | None:
        state = self.ranks.get(rank)
        return None if state is None else state.last_step

    def all_reported(self, step: int) -> bool:
        if len(self.ranks) < self.world_size:
            return False
        # Asked at each record while a rule waits, and there may be thousands: whom all waited for
        # is asked first, and those that came last are behind most often.
        lagging = self.ranks.get(self.lagging)
        if lagging is not None and not lagging.reported(step):
            return False
        for number, rank in reversed(self.ranks.items()):
            if not rank.reported(step):
                self.lagging = number
                return False
        return True

    def ranks_read(self) -> Collection[int]:
        return self.parts.ranks()

    def heartbeat_ms(self, rank: int) -> int:
        state = self.ranks.get(rank)
        return state.heartbeat_ms if state else 10_000

    def launcher_heard_ms(self) -> int | None:
        return self.launcher.heard_ms if self.launcher else None

    def checkpoint_before(self, step: int | None) -> Checkpoint | None:
        good = [c for c in self.checkpoints if c.sound]
        if step is not None:
            good = [c for c in good if c.step < step]
        if not good:
            return None
        last = self.last_step or 0 if step is None else step - 1
        verified = [c for c in good if last - c.step >= VERIFIED_STEPS]
        return (verified or good)[-1].model_copy(update={"verified": bool(verified)})

    # -- inside ----------------------------------------------------------------------------

    def _learn_event(self, data: RunData, meta: Meta, now_ms: int) -> None:
        # A launcher may tell of the end of a training when the next one has begun.
        if isinstance(data, StopAnswer) and data.incarnation == self.incarnation:
            self.stop = answered(self.stop, data, now_ms)
        if data.role == "launcher":
            if self.launcher is None or isinstance(data, RunStarted):
                self.launcher = LauncherState(meta.boot, now_ms)
            self.launcher.heard_ms = now_ms
            rank = None
        else:
            rank = self._rank(data.rank, now_ms)
            self.world_size = max(self.world_size, data.world_size)
        if isinstance(data, RunStarted):
            self._started(data, rank)
        elif isinstance(data, Heartbeat):
            if rank is not None:
                rank.capture = data.capture or rank.capture
        elif isinstance(data, OptimizersSeen):
            self.losses = data.losses
        elif isinstance(data, TrainingPlanned):
            self._plan(data)
        elif isinstance(data, CheckpointWritten):
            self.checkpoints = [*self.checkpoints, data.checkpoint][-_CHECKPOINTS:]
        elif isinstance(data, CheckpointRead):
            self.checkpoints = [data.updated(c) for c in self.checkpoints]
        elif isinstance(data, RunEnded):
            self._ended(data, rank, now_ms)

    def _started(self, data: RunStarted, rank: RankState | None) -> None:
        if len(self.labels.keys() | data.labels.keys()) <= MAX_ENTRIES:
            self.labels = {**self.labels, **data.labels}
        self.scheduler = self.scheduler or data.scheduler
        self.node = self.node or data.node
        self.command = self.command or data.command
        if data.ends_by_ms is not None:
            self.planned = self.planned.model_copy(update={"ends_by_ms": data.ends_by_ms})
        if rank is not None:
            rank.heartbeat_ms = round(1000 * data.heartbeat_s)
            rank.devices = data.devices
            self.trains = True
            self.acts = self.acts or data.environment
            self.optimizers = max(self.optimizers, data.optimizers)
            self.collections = sorted({*self.collections, *data.collections})[:MAX_COLLECTIONS]

    def _plan(self, data: TrainingPlanned) -> None:
        plan = data.model_dump(include={"total_steps", "done_steps", "source"}, exclude_none=True)
        self.planned = self.planned.model_copy(update=plan)

    def _ended(self, data: RunEnded, rank: RankState | None, now_ms: int) -> None:
        if rank is None:
            self.outcome, self.exit_code = data.outcome, data.exit_code
            self._end(now_ms)
            return
        self.world_size = max(self.world_size, data.world_size)
        rank.outcome = data.outcome
        rank.capture = data.capture or rank.capture
        heard = len(self.ranks) >= self.world_size  # a rank may be late, and its story is wanted
        if self.launcher is None and heard and all(r.outcome for r in self.ranks.values()):
            self._end(now_ms)

    def _end(self, now_ms: int) -> None:
        self.ended_ms = now_ms
        if self.outcome is None:
            outcomes = {rank.outcome for rank in self.ranks.values()}
            self.outcome = next((o for o in _WORST if o in outcomes), None)
        if self.outcome == "failed" and (step := self.last_step) is not None:
            code = "" if self.exit_code is None else str(self.exit_code)
            self.restarts.note(Fault(FAILED, "", step, self.incarnation, now_ms, code))

    def _rank(self, number: int, now_ms: int) -> RankState:
        rank = self.ranks.get(number)
        if rank is None:
            rank = self.ranks[number] = RankState()
        rank.last_heard_ms = now_ms
        return rank


def _identity(value: Value) -> tuple[str, str, Literal["launcher", "trainer", "node"]]:
    if isinstance(value, SystemFrame):
        return value.origin.run_id, value.origin.incarnation, "node"
    if isinstance(value, StepFrame | TensorFrame):
        return value.origin.run_id, value.origin.incarnation, "trainer"
    if not isinstance(value.data, RunData):
        raise MalformedRecord(f"{value.type} is not telemetry of a run")
    return value.data.run_id, value.data.incarnation, value.data.role


def _rank_of(value: Value) -> int:
    if isinstance(value, Event):
        return value.data.rank if isinstance(value.data, RunData) else 0
    return value.origin.rank


def _starts(value: Value) -> bool:
    return isinstance(value, Event) and isinstance(value.data, RunStarted)


def _is_launcher(value: Value) -> bool:
    return _identity(value)[2] == "launcher"
