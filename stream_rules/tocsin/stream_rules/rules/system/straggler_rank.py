"""`straggler_rank`: one rank is slower than the others at its own work, so all wait for it.

Ranks that average their gradients step together: all have the step time of the slowest one, and the
others spend the difference in their backward pass, which contains the collective. So neither the
step time nor the backward pass shows which rank is slow. Only the wait for the batch and the
forward pass are certainly a rank's own work. A rank is slow at a step when

- own > `factor` · median of the other ranks' own, and
- the excess own - median is at least `least_percent` of the step time, and 3 ms, and
- the others' backward pass is longer than this rank's by at least half of the excess: they wait.

The rule names it when that was true at four of five of the last `for_steps` steps that all ranks
have reported. The first ten steps do not count. Branches: `data` (its own wait for batches alone is
enough; the others may then wait in their forward pass, too) and `compute`.

On GPUs the host's clock means little. There the rule uses the GPU's own times, which every tenth
step has, and needs a quarter as many of them. If the model is sharded over the ranks (FSDP, tensor
and pipeline parallel), forward passes contain collectives, and stages differ by design, so the rule
only checks `data`. Ranks that do not wait for each other cannot have a straggler. The rule requires
four of five steps because the times of two equal ranks on two busy cores differ by 12 ms in one
step of ten, and by 0.2 ms in the median (gloo, steps of 8 ms).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, StepFrame
from tocsin.schemas.records.issues import Series, Subject
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar

Branch = Literal["data", "compute"]
Flags = npt.NDArray[np.bool_]

_COLUMNS: Final = (
    "data_wait_s",
    "forward_s",
    "backward_s",
    "step_time_s",
    "forward_device_s",
    "backward_device_s",
)
_DATA, _FORWARD, _BACKWARD, _STEP, _FORWARD_DEVICE, _BACKWARD_DEVICE = range(len(_COLUMNS))
_BRANCHES: Final[tuple[Branch, ...]] = ("data", "compute")
_FIRST: Final = 10
_MIN_S: Final = 0.003
_WAITING: Final = 0.5
_OFTEN: Final = 0.8
_SELDOM: Final = 0.4
_PENDING_CELLS: Final = 1 << 16
_JUDGED_CELLS: Final = 1 << 16
_SERIES_CELLS: Final = 1 << 14
"""Of how many ranks times steps something is remembered: a state has to fit into a record."""


class StragglerRankParams(Params):
    """Parameters of `straggler_rank`."""

    factor: float = Field(default=1.2, gt=1)
    """Ratio of the rank's own work to the work of the others. Unit: a factor."""
    for_steps: int = Field(default=20, ge=5, le=1000)
    """Number of steps that are checked; for more than 65 ranks no more than 65,536 / ranks, or 20.
    Unit: steps; on GPUs a quarter as many timed ones."""
    least_percent: float = Field(default=10.0, ge=0, lt=100)
    """Minimum share of the step time that is lost. Unit: percent."""


@dataclass(slots=True)
class _State:
    world: int = 0
    on_device: bool = False
    parted: bool = False
    node_of: dict[int, str] = field(default_factory=dict)
    pending: dict[int, StateArray] = field(default_factory=dict)
    done: int = -1
    judged: int = 0
    steps: list[int] = field(default_factory=list)
    slow: list[StateArray] = field(default_factory=list)
    excess: list[StateArray] = field(default_factory=list)
    open: list[int] = field(default_factory=list)


class StragglerRank(Rule[StragglerRankParams, _State]):
    """One episode for each rank."""

    meta = RuleMeta(
        name="straggler_rank",
        version=1,
        family="system",
        meaning="One rank is slower than the others at its own work, and the others wait for it.",
        severity="warning",
        available="maybe",
        inputs=(
            scalar("forward_s"),
            scalar("data_wait_s", optional=True),
            scalar("backward_s", optional=True),
            scalar("step_time_s", optional=True),
            scalar("forward_device_s", optional=True),
            scalar("backward_device_s", optional=True),
            scalar("gradient_norm_local_part", optional=True),
            event(RunStarted, optional=True),
        ),
        capture_hint="each rank of a job is captured; the times of a step are captured when "
        "backward() is called",
        remedy="Check that rank's node and GPU (clocks, other processes, its data path), and give "
        "it no more work than the others; replace the node if the problem remains.",
        params=StragglerRankParams,
        branches={
            "data": "the rank waits longer for its batches",
            "compute": "the rank's batch and forward pass take longer",
        },
        does_not_see="A rank that is slow only in its backward pass, in its optimizer or between "
        "steps; a slow forward pass in pipeline, tensor and sharded parallelism; a rank that is "
        "slow only occasionally.",
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, RunStarted) and data.role == "trainer":
            self.state.node_of[data.rank] = data.node
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state, rank = self.state, frame.origin.rank
        if frame.origin.world_size < 2 or rank >= frame.origin.world_size:
            return
        if frame.origin.world_size != state.world:
            # Ranks of another world are other ranks.
            yield from [Clear(about=str(one)) for one in state.open]
            state.world, state.judged, state.open = frame.origin.world_size, 0, []
            state.pending, state.slow, state.excess, state.steps = {}, [], [], []
        if not state.on_device and "forward_device_s" in frame.columns:
            # The host's clock has told nothing so far.
            state.on_device = True
            state.slow, state.excess, state.steps = [], [], []
        state.parted |= "gradient_norm_local_part" in frame.columns
        columns = [(i, c) for i, n in enumerate(_COLUMNS) if (c := frame.column(n)) is not None]
        if not columns:
            return
        for at_row, step in enumerate(frame.steps.tolist()):
            if step <= state.done:
                continue
            row = state.pending.get(step)
            if row is None:
                row = state.pending[step] = np.full(
                    (state.world, len(_COLUMNS)), np.nan, np.float32
                )
            for place, column in columns:
                row[rank, place] = column[at_row]
            # Ranks come in their order, more or less: most often the last one is still to come.
            last_is_there = not np.isnan(row[-1, _STEP])
            if last_is_there and _complete(row, on_device=state.on_device).all():
                yield from self._evaluate_step(step)
        most = max(8, _PENDING_CELLS // (state.world * len(_COLUMNS)))
        while len(state.pending) > most:
            yield from self._evaluate_step(min(state.pending))

    def _evaluate_step(self, step: int) -> Outcomes:
        """Judge a step; those before it will not become whole any more."""
        state = self.state
        row = state.pending[step].astype(np.float64)
        state.done = step
        state.pending = {s: r for s, r in state.pending.items() if s > step}
        there = _complete(row, on_device=state.on_device)
        if there.sum() < max(2, math.ceil(0.75 * state.world)):
            return
        state.judged += 1
        if state.judged > _FIRST or state.on_device:
            slow, excess = self._slow(row, there)
            needed = self._needed()
            kept = max(needed, min(SERIES_POINTS, _SERIES_CELLS // state.world))
            state.slow = [*state.slow, slow][-needed:]
            state.excess = [*state.excess, excess.astype(np.float32)][-kept:]
            state.steps = [*state.steps, step][-kept:]
            yield from self._evaluate(step)

    def _needed(self) -> int:
        steps = min(self.params.for_steps, max(20, _JUDGED_CELLS // self.state.world))
        return max(5, math.ceil(steps / 4)) if self.state.on_device else steps

    def _slow(self, row: Doubles, there: Flags) -> tuple[Flags, Doubles]:
        """Which ranks are slow, by branch, and how many seconds their excess is."""
        state, params = self.state, self.params
        data = np.nan_to_num(row[:, _DATA])
        host = row[:, _FORWARD] + row[:, _BACKWARD]
        if state.on_device:
            forward, back = row[:, _FORWARD_DEVICE], row[:, _BACKWARD_DEVICE]
            own = {"data": (data, forward + back), "compute": (forward, back)}
        else:
            own = {"data": (data, host), "compute": (data + row[:, _FORWARD], row[:, _BACKWARD])}
        least_s = max(_MIN_S, params.least_percent / 100 * float(np.median(row[there, _STEP])))
        slow = np.zeros((state.world, len(_BRANCHES)), np.bool_)
        excess = np.full(state.world, np.nan)
        for place, branch in enumerate(_BRANCHES):
            if branch == "compute" and state.parted:
                continue
            work, waiting = own[branch]
            usual, waited = _median_of_others(work, there), _median_of_others(waiting, there)
            more = work - usual
            with np.errstate(invalid="ignore"):
                slow[:, place] = (
                    there
                    & (work > params.factor * usual)
                    & (more >= least_s)
                    & (waited - waiting >= _WAITING * more)
                )
            excess = np.fmax(excess, np.where(there, more, np.nan))
        return slow, excess

    def _evaluate(self, step: int) -> Outcomes:
        state = self.state
        if len(state.slow) < self._needed():
            return
        often = np.mean(state.slow, axis=0)
        for rank in np.flatnonzero((often >= _OFTEN).any(1)).tolist():
            if rank not in state.open:
                state.open = [*state.open, rank]
            yield self._finding(rank, "data" if often[rank, 0] >= _OFTEN else "compute")
        for rank in list(state.open):
            if often[rank].max() <= _SELDOM:
                yield Clear(step, about=str(rank))

    def _finding(self, rank: int, branch: Branch) -> Finding:
        state = self.state
        place = _BRANCHES.index(branch)
        marks = np.array([slow[rank, place] for slow in state.slow])
        recent = state.steps[-len(marks) :]
        lost_s = np.array([excess[rank] for excess in state.excess], np.float64)
        median_s = float(np.nanmedian(lost_s[-len(marks) :]))
        node = state.node_of.get(rank, "")
        beside = sorted(r for r, name in state.node_of.items() if name == node)
        where = f" on {node}" if node else ""
        doing = "waiting for its batches" if branch == "data" else "its batch and forward pass"
        facts = [
            fact("excess", 1000 * median_s, unit="ms"),
            fact("steps", 100 * float(marks.mean()), limit=100 * _OFTEN, unit="percent"),
        ]
        if node:
            facts.append(fact("node", node))
        if rank in beside:
            facts.append(fact("local_rank", beside.index(rank)))
        return Finding(
            about=str(rank),
            branch=branch,
            subject=Subject(kind="rank", name=f"rank {rank}"),
            reason=f"rank {rank}{where} takes {1000 * median_s:,.0f} ms longer than the others for "
            f"{doing}, in {marks.sum():.0f} of {len(marks)} steps, and they wait for it",
            first_step=recent[int(np.flatnonzero(marks)[0])],
            first_rank=rank,
            facts=tuple(facts),
            series=Series(
                name=f"extra time of rank {rank}",
                unit="ms",
                steps=tuple(state.steps[-SERIES_POINTS:]),
                values=tuple((1000 * lost_s[-SERIES_POINTS:]).tolist()),
            ),
            explanation="own work is the part without waiting for other ranks: the wait for "
            "the batch and the forward pass; it is compared with the median of the other ranks",
        )


def _complete(row: Doubles, *, on_device: bool) -> Flags:
    """Which ranks have told all that is needed of a step."""
    needed = [_FORWARD, _BACKWARD, _STEP]
    if on_device:
        needed += [_FORWARD_DEVICE, _BACKWARD_DEVICE]
    return np.asarray(np.isfinite(row[:, needed]).all(axis=1), np.bool_)


def _median_of_others(values: Doubles, there: Flags) -> Doubles:
    """For each rank that is there the median of the others that are; NaN for the rest."""
    known = values[there]
    last = len(known) - 1
    order = np.argsort(known, kind="stable")
    place = np.empty(len(known), np.int64)
    place[order] = np.arange(len(known))
    ordered = known[order]

    def without(at: int) -> Doubles:
        """The sorted values of all but one, at that place."""
        found: Doubles = np.where(at < place, ordered[at], ordered[min(at + 1, last)])
        return found

    high = last // 2
    low = high if last % 2 else high - 1
    medians = np.full(len(values), np.nan)
    medians[there] = (without(low) + without(high)) / 2
    return medians
