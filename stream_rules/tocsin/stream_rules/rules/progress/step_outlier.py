"""`step_outlier`: some steps take far longer than the others and cost much time in total.

Every 50 steps, from 100 on, the rule checks the last `window` steps; the time of a step is its
`step_time_s` without evaluations. A step is an outlier when it takes longer than median + `stddev`
· 1.4826 · MAD (the median absolute deviation), and longer than twice the median. The condition is
that the number of outliers exceeds `n_outliers`, and that their time beyond the median, without the
`n_outliers` longest, is at least `least_percent` of the total time and at least `least`. SageMaker
Debugger's rule uses mean and standard deviation, which the outliers themselves raise: if each tenth
step is 20 times slower, it finds nothing. The rule requires lost time because every program has
some slow steps.

The branch shows what the outliers have in common: first, the part of the step with most of the
excess (the data loader, writing checkpoints); otherwise a metric of the node that is twice as high
as usual at those moments, and higher by ten points (I/O wait, a CPU quota, memory pressure, a
throttled GPU, a busy CPU); otherwise the loop itself, if the outliers are evenly spaced, as with
logging.

An info: shared machines have outliers, and many programs cause them on purpose. On a machine with
two cores and four times their capacity in work, 6 of 89 healthy trainings met the condition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import StepFrame, SystemFrame
from tocsin.schemas.records.issues import Fact, Series, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Params, Rule, RuleMeta
from tocsin.stream_rules.signals import node_context
from tocsin.stream_rules.signals.node_context import NodeContext
from tocsin.stream_rules.signals.step_time_breakdown import INPUTS, PARTS, lowest_rank_breakdown

_MIN_STEPS: Final = 100
_SETTLE: Final = 10
_EVERY: Final = 50
_SIGMA: Final = 1.4826
_TIMES: Final = 2.0
_MAIN_SHARE: Final = 0.5
_EVEN: Final = 0.75
_OWN: Final = {"data": "data_loading", "checkpoint": "checkpoint"}
_WORDS: Final = {
    "data_loading": "spent waiting for data",
    "checkpoint": "spent writing checkpoints",
    "io_wait": "lost while the node waited for its disks",
    "cpu_throttle": "lost while the job's CPU quota was used up",
    "memory_pressure": "lost while the node was short of memory",
    "gpu_throttle": "lost while a GPU was throttled",
    "busy_cpu": "lost while other work kept the node's CPUs busy",
    "the_loop": "lost at regular intervals, in something that the loop does periodically",
    "unexplained": "lost in steps with no visible common cause",
}


class StepOutlierParams(Params):
    """Parameters of `step_outlier`."""

    stddev: float = Field(default=5.0, gt=0)
    """Distance above the median. Unit: standard deviations, by the MAD."""
    n_outliers: int = Field(default=10, ge=0)
    """Number of outliers that are allowed in the window. Unit: steps."""
    window: int = Field(default=1000, ge=100, le=10_000)
    """Number of steps that are checked. Unit: steps."""
    least: Duration = Field(default=timedelta(seconds=5), examples=["5s"])
    """Minimum time that they cost. Unit: a duration."""
    least_percent: float = Field(default=20.0, ge=0, lt=100)
    """Minimum time that they cost beyond the median, without the `n_outliers` longest. Unit:
    percent of the time of all steps."""


@dataclass(slots=True)
class _State:
    rank: int | None = None
    last_step: int = -1
    seen: int = 0
    steps: StateArray = field(default_factory=lambda: np.zeros(0, np.int64))
    ends_us: StateArray = field(default_factory=lambda: np.zeros(0, np.int64))
    parts: StateArray = field(default_factory=lambda: np.zeros((0, len(PARTS))))
    looked: int = 0
    first_step: int | None = None
    first_ms: int = 0
    branch: str = ""
    node: NodeContext = field(default_factory=NodeContext)


class StepOutlier(Rule[StepOutlierParams, _State]):
    """An info that shows what the slow steps have in common."""

    meta = RuleMeta(
        name="step_outlier",
        version=1,
        family="progress",
        meaning="Some steps take far longer than the others and cost much time in total.",
        severity="info",
        inputs=(*INPUTS, *node_context.INPUTS),
        available="maybe",
        capture_hint="the time of steps is captured when a PyTorch optimizer steps",
        remedy="The issue names what the slow steps have in common. Give the data loader more "
        "workers, write checkpoints asynchronously, or move other work off the node.",
        does_not_see="Slow steps that are half of all steps or more: they are the usual ones then. "
        "Evaluations, whose time is subtracted.",
        alias="StepOutlier",
        presets={
            "sagemaker": {
                "stddev": 5.0,
                "n_outliers": 10,
                "window": 10_000,
                "least": timedelta(0),
                "least_percent": 0.0,
            }
        },
        branches={name: f"Most of the time is {words}." for name, words in _WORDS.items()},
        params=StepOutlierParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        self.state.node.add(frame)
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        rank, parts = frame.origin.rank, lowest_rank_breakdown(frame, self.state.rank)
        if parts is None:
            return
        if rank != self.state.rank:
            self.state = _State(rank=rank, node=self.state.node)
        state, window = self.state, self.params.window
        steps = frame.steps.astype(np.int64)
        new = (steps > state.last_step) & np.isfinite(parts[:, -1])
        if not new.any():
            return
        state.last_step = int(steps[new][-1])
        state.seen += int(new.sum())
        state.steps = np.concatenate([state.steps, steps[new]])[-window:]
        state.ends_us = np.concatenate([state.ends_us, frame.at_us[new].astype(np.int64)])[-window:]
        state.parts = np.vstack([state.parts, parts[new]])[-window:]
        if state.seen - state.looked >= _EVERY and state.seen >= _MIN_STEPS + _SETTLE:
            state.looked = state.seen
            yield from self._inspect(at)

    def _inspect(self, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        settling = max(0, _SETTLE - (state.seen - len(state.steps)))
        parts, steps, ends = (
            state.parts[settling:], state.steps[settling:], state.ends_us[settling:]
        )  # fmt: skip
        total = parts.sum(axis=1)
        median = float(np.median(total))
        spread = _SIGMA * float(np.median(np.abs(total - median)))
        limit = max(median + params.stddev * spread, _TIMES * median)
        out = total > limit
        excess = np.sort(total[out] - median)
        lost = float(excess[: max(0, len(excess) - params.n_outliers)].sum())
        percent = 100 * lost / max(float(total.sum()), 1e-30)
        too_little = lost < params.least / timedelta(seconds=1) or percent < params.least_percent
        if len(excess) <= params.n_outliers or too_little:
            if state.first_step is not None:
                state.first_step = None
                yield Clear(state.last_step)
            return
        if state.first_step is None:
            state.first_step, state.first_ms = int(steps[out][0]), at.now_ms
            state.branch = ""
        branch, facts = self._cause(parts, steps, ends, out)
        state.branch = state.branch or branch
        times = float(total[out].mean()) / max(median, 1e-30)
        yield Finding(
            branch=state.branch,
            subject=Subject(kind="scalar", name="step_time_s"),
            reason=f"{int(out.sum()):,} of the last {len(total):,} steps took more than "
            f"{1000 * limit:,.4g} ms, {times:,.0f} times the usual {1000 * median:,.4g} ms on "
            f"average: {percent:.0f} % of the time, {_WORDS[branch]}",
            first_step=state.first_step,
            first_rank=state.rank,
            onset_ms=state.first_ms,
            facts=(
                fact("outliers", out.sum(), limit=params.n_outliers),
                fact("lost", percent, limit=params.least_percent, unit="percent"),
                fact("usual_step_time", median, limit=limit, unit="s"),
                *facts,
            ),
            series=Series(
                name="step time of the outliers",
                unit="s",
                steps=tuple(steps[out][-SERIES_POINTS:].tolist()),
                values=tuple(total[out][-SERIES_POINTS:].tolist()),
                limit=limit,
            ),
            explanation=_WORDS[branch],
        )

    def _cause(
        self,
        parts: Doubles,
        steps: npt.NDArray[np.int64],
        ends_us: npt.NDArray[np.int64],
        out: npt.NDArray[np.bool_],
    ) -> tuple[str, list[Fact]]:
        """What the outliers have in common, and the facts behind that."""
        excess = np.maximum(parts[out] - np.median(parts, axis=0), 0.0).sum(axis=0)
        shares = excess / max(float(excess.sum()), 1e-30)
        facts = [
            fact(f"excess_in_{name}", 100 * shares[j], unit="percent")
            for j, name in enumerate(PARTS)
            if shares[j] > 0
        ]
        for name, branch in _OWN.items():
            if shares[PARTS.index(name)] >= _MAIN_SHARE:
                return branch, facts
        begins_us = ends_us[out] - 1e6 * parts[out].sum(axis=1)
        signs = self.state.node.signs(begins_us, ends_us[out].astype(np.float64))
        for sign, (high, low) in signs.items():
            facts += [
                fact(f"{sign}_in_outliers", high, unit="percent"),
                fact(f"{sign}_else", low, unit="percent"),
            ]
        if signs:
            return next(iter(signs)), facts
        gaps = np.diff(steps[out])
        usual = float(np.median(gaps)) if len(gaps) else 0.0
        if usual > 1 and float((np.abs(gaps - usual) <= 0.02 * usual).mean()) >= _EVEN:
            return "the_loop", [*facts, fact("every", usual, unit="steps")]
        return "unexplained", facts
