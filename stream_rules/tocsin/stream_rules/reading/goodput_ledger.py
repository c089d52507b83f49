"""Where the time of a run went, over all its incarnations: a fold with a bounded state. Pure.

The time of an incarnation is cut at the ends of the steps of its lowest rank, on the bus's clock:
the rank's own clock is moved by the least delay with which anything of it was appended. What a
step's scalars tell is taken from the time up to its end: an evaluation, checkpoints, the share
that the loop waited for data; the rest is the step itself, of which all above the usual time counts
as stalled once it is more than `STALL_STEPS` steps and `STALL_MS`. Steps that were passed over
count as the one that was looked at. Each millisecond gets into one part, so they add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import Floats, StepFrame
from tocsin.schemas.records.goodput import PARTS, Goodput
from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.runs import PhaseMark, RunData, RunStarted
from tocsin.stream_rules.reading.goodput_lineage import (
    Kept,
    Lap,
    kept_of,
    origin_by_file,
    origin_by_step,
)

STALL_STEPS: Final = 20
STALL_MS: Final = 10_000.0
"""A step is stalled once it takes more than so many usual ones and that long, milliseconds."""

MAX_LAPS: Final = 64
"""Incarnations that are remembered one by one; of older ones only the sums."""

_RECENT: Final = 32
_ENOUGH: Final = 3
_OPEN: Final = 16
_PHASES: Final = {
    "evaluation": "evaluation",
    "validation": "evaluation",
    "test": "evaluation",
    "checkpoint": "checkpoint",
}


@dataclass(slots=True)
class Clock:
    """Up to where the incarnation at hand is accounted, and what is known of what follows.

    Attributes:
        cursor_ms: up to there, bus time.
        shift_ms: what is added to the rank's clock; None: nothing of it was heard.
        rank: the lowest that was heard; its steps are counted.
        timed: whether its steps have durations.
        recent: time of the last steps, milliseconds.
        opened: phases under way -> when they began.
        closed: phases that have ended since the last step -> how long they lasted.
    """

    cursor_ms: float = 0.0
    shift_ms: float | None = None
    rank: int | None = None
    last_step: int | None = None
    timed: bool = False
    recent: list[float] = field(default_factory=list)
    opened: dict[str, float] = field(default_factory=dict)
    closed: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class GoodputLedger:
    """The accounts of one run. `lap` is the incarnation at hand, `past` those before it."""

    first_ms: float | None = None
    down_ms: float = 0.0
    forgotten: int = 0
    older: dict[str, float] = field(default_factory=dict)
    past: list[Lap] = field(default_factory=list)
    lap: Lap = field(default_factory=Lap)
    clock: Clock = field(default_factory=Clock)

    # -- incarnations --------------------------------------------------------------------------

    def next(
        self,
        incarnation: str,
        now_ms: int,
        *,
        until_ms: int,
        over: bool,
        completed: bool,
        same_job: bool,
    ) -> GoodputLedger:
        """The accounts as an incarnation begins; these stay as they are.

        Args:
            incarnation: its id.
            now_ms: append time of its first record.
            until_ms: until when the one before was heard, or when it ended.
            over: whether that one has ended, or was lost.
            completed: whether it has done all that it was to do.
            same_job: whether the job was not started anew: what has passed since belongs to it.
        """
        if self.first_ms is None:
            start, past, down_ms = float(now_ms), self.past, 0.0
        elif self.clock.rank is None and not over:
            # Only launchers have spoken: of a job on several nodes each begins one.
            return replace(self, lap=replace(self.lap, incarnation=incarnation))
        else:
            until = self._up_to(until_ms)
            start = until if same_job else max(until, float(now_ms))
            past = [*self.past, self._closed(until, over=True, completed=completed)]
            down_ms = self.down_ms + start - until
        following = replace(
            self,
            first_ms=start if self.first_ms is None else self.first_ms,
            down_ms=down_ms,
            older=dict(self.older),
            past=past,
            lap=Lap(incarnation=incarnation),
            clock=Clock(cursor_ms=start),
        )
        following._drop_oldest()
        return following

    def _drop_oldest(self) -> None:
        """Keep only the sums of the oldest incarnation if there are too many."""
        if len(self.past) <= MAX_LAPS:
            return
        kept = kept_of(self.past)[0]
        oldest, *self.past = self.past
        for part, ms in _parts(oldest, kept).items():
            self.older[part] = self.older.get(part, 0.0) + ms
        self.forgotten += 1

    # -- records -------------------------------------------------------------------------------

    def learn(self, value: StepFrame | Event[Data], now_ms: int) -> None:
        """Take in steps or an event of the incarnation at hand; `now_ms` is the append time."""
        if isinstance(value, StepFrame):
            if value.mode == "train" and value.steps.size and self._leads(value.origin.rank):
                self._steps(value, now_ms)
            return
        data = value.data
        if not isinstance(data, RunData) or data.role != "trainer":
            return
        if isinstance(data, CheckpointWritten):
            self.lap.saved(data.checkpoint.path, self._trained_at(data.checkpoint.step))
        elif isinstance(data, RunStarted):
            self._started(data)
        elif isinstance(data, TrainingPlanned):
            self._planned(data)
        if self._leads(data.rank):
            at_ms = self._place(value.time_ms, now_ms)
            if isinstance(data, PhaseMark):
                self._phase(data, at_ms)

    def _leads(self, rank: int) -> bool:
        clock = self.clock
        if clock.rank is None or rank < clock.rank:
            # Another rank has another clock.
            clock.rank, clock.shift_ms = rank, None
            clock.opened.clear()
        return rank == clock.rank

    def _place(self, sent_ms: float, now_ms: int) -> float:
        """A time of the rank's clock on that of the bus."""
        clock, delay = self.clock, now_ms - sent_ms
        clock.shift_ms = delay if clock.shift_ms is None else min(clock.shift_ms, delay)
        return sent_ms + clock.shift_ms

    def _started(self, data: RunStarted) -> None:
        found = origin_by_file(self.past, data.loaded)
        self.lap.origin = found or self.lap.origin

    def _planned(self, data: TrainingPlanned) -> None:
        if data.done_steps is None:
            return
        self.lap.done_steps = data.done_steps
        if self.lap.origin is None:
            self.lap.origin = origin_by_step(self.past, data.done_steps)

    def _phase(self, data: PhaseMark, at_ms: float) -> None:
        opened, closed = self.clock.opened, self.clock.closed
        if data.edge == "begin":
            if len(opened) < _OPEN:
                opened[data.name] = at_ms
        elif (began := opened.pop(data.name, None)) is not None:
            lasted = at_ms - began if data.duration_s is None else 1000 * data.duration_s
            if data.name in closed or len(closed) < _OPEN:
                closed[data.name] = closed.get(data.name, 0.0) + max(0.0, lasted)

    def _steps(self, frame: StepFrame, now_ms: int) -> None:
        took = _Seconds(frame, "step_time_s")
        loaded = _Seconds(frame, "data_wait_s")
        evaluated, saved = _Seconds(frame, "evaluation_s"), _Seconds(frame, "checkpoint_s")
        clock, lap = self.clock, self.lap
        timed = took.column is not None
        if clock.timed and not timed:
            return  # scalars beside those of a step
        rows = zip(frame.steps.tolist(), frame.at_us.tolist(), strict=True)
        for i, (step, at_us) in enumerate(rows):
            if clock.last_step is not None and step <= clock.last_step:
                continue
            clock.timed |= timed
            at_ms = max(self._place(at_us / 1000, now_ms), clock.cursor_ms)
            gap = at_ms - clock.cursor_ms
            if clock.last_step is None:
                lap.add("starting", gap)
            elif timed:
                # The step's own numbers of these are exact; it has none of other phases.
                phases = {n: ms for n, ms in clock.closed.items() if n not in _PHASES}
                phases |= {"evaluation": evaluated.ms(i), "checkpoint": saved.ms(i)}
                rest = self._account(gap, phases)
                own = took.ms(i) - sum(phases.values())
                waited = rest * min(1.0, loaded.ms(i) / own) if own > 0 else 0.0
                lap.add("data_wait", waited)
                self._made(rest - waited, step - clock.last_step)
            else:
                self._made(self._account(gap, clock.closed), step - clock.last_step)
            clock.last_step, clock.cursor_ms = step, at_ms
            lap.steps = step + 1
            clock.closed.clear()
            for name in [name for name, began in clock.opened.items() if began < at_ms]:
                del clock.opened[name]  # training goes on in it: it is no pause

    def _account(self, left_ms: float, phases: dict[str, float]) -> float:
        """Account for phases within a time; what is left of it."""
        for name, ms in phases.items():
            taken = min(left_ms, ms)
            self.lap.add(_PHASES.get(name, "other"), taken)
            left_ms -= taken
        return left_ms

    def _made(self, own_ms: float, steps: int) -> None:
        """So many steps were made in a time that was nothing else."""
        stalled = 0.0
        if own_ms > STALL_MS and len(self.clock.recent) >= _ENOUGH:
            usual = steps * median(self.clock.recent)
            if own_ms - usual > max(STALL_MS, STALL_STEPS * usual / steps):
                stalled = own_ms - usual
                self.lap.add("stalled", stalled)
        self.lap.trained_ms += own_ms - stalled
        if not stalled:
            self.clock.recent.append(own_ms / steps)
            del self.clock.recent[:-_RECENT]

    def _trained_at(self, step: int) -> float:
        """The time in steps up to that step, which was one of the last."""
        last, recent = self.clock.last_step, self.clock.recent
        if last is None or step < 0:
            return 0.0
        since = max(0, last - step) * (sum(recent) / len(recent) if recent else 0.0)
        return max(0.0, self.lap.trained_ms - since)

    # -- the accounts --------------------------------------------------------------------------

    def step_s(self) -> float | None:
        """What a step takes, with its share of data, evaluations and checkpoints, seconds."""
        if self.lap.steps < 2:
            return None
        beside = ("data_wait", "evaluation", "checkpoint")
        spent = self.lap.trained_ms + sum(self.lap.parts.get(name, 0.0) for name in beside)
        return spent / (self.lap.steps - 1) / 1000

    def goodput(self, until_ms: int, *, over: bool, completed: bool) -> Goodput | None:
        """All parts up to a time; None: nothing was heard yet.

        `over`: whether the incarnation at hand has ended; `completed`: as it was to.
        """
        if self.first_ms is None:
            return None
        until = self._up_to(until_ms)
        laps = [*self.past, self._closed(until, over=over, completed=over and completed)]
        sums = {**dict.fromkeys(PARTS, 0.0), **self.older}
        sums["down"] = self.down_ms
        for lap, kept in zip(laps, kept_of(laps), strict=True):
            for part, ms in _parts(lap, kept).items():
                sums[part] += ms
        return Goodput(
            started_ms=round(self.first_ms),
            wall_s=max(0.0, until - self.first_ms) / 1000,
            incarnations=self.forgotten + len(laps),
            **{f"{part}_s": max(0.0, sums[part]) / 1000 for part in PARTS},
        )

    def _up_to(self, until_ms: float) -> float:
        return max(self.clock.cursor_ms, float(until_ms))

    def _closed(self, until_ms: float, *, over: bool, completed: bool) -> Lap:
        """The incarnation at hand, with what has passed since its last step."""
        clock = self.clock
        lap = replace(self.lap, parts=dict(self.lap.parts), completed=completed)
        left = until_ms - clock.cursor_ms
        if clock.last_step is None:
            lap.add("starting", left)
            return lap
        phases = dict(clock.closed)
        for name, began in clock.opened.items():
            phases[name] = phases.get(name, 0.0) + max(0.0, until_ms - max(began, clock.cursor_ms))
        for name, ms in phases.items():
            taken = min(left, ms)
            lap.add(_PHASES.get(name, "other"), taken)
            left -= taken
        usual = median(clock.recent) if clock.recent else 0.0
        if not completed and left > max(STALL_MS, STALL_STEPS * usual):
            lap.add("stalled", left)
        elif over:
            lap.add("ending", left)
        else:
            lap.trained_ms += left
        return lap


@dataclass(slots=True)
class _Seconds:
    """One column of durations; zero where it is not there, or is not finite."""

    column: Floats | None

    def __init__(self, frame: StepFrame, name: str) -> None:
        self.column = frame.column(name)

    def ms(self, row: int) -> float:
        if self.column is None:
            return 0.0
        seconds = float(self.column[row])
        return 1000 * seconds if 0 < seconds < math.inf else 0.0


def _parts(lap: Lap, kept: Kept) -> dict[str, float]:
    steps = {"productive": kept.productive, "redone": kept.redone, "unknown": kept.unknown}
    return {**lap.parts, **steps}
