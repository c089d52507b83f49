"""`throughput_regression`: steps have become slower and stay slower.

The time of a step is its `step_time_s` without evaluations. The rule ignores the first ten steps
and uses the medians b of `block` steps each, so that an occasional slow step (logging, a
checkpoint, another program) does not count. With m the median of the last 200 such blocks, the
CUSUM is S = max(0, S + ln(b / m) - ln(1 + `percent` / 100) / 2); steps are slower since S has left
zero. The condition is that since then at least `for_steps` steps have passed, their median is more
than `percent` above m, and that at least `least` was lost in total: so a small shift must last for
minutes, a large one for seconds. Blocks since then are not included in m. The issue resolves when
the blocks of `for_steps` steps are back below half of the shift; after 2,000 steps this is the
usual speed, and later steps are compared with it.

On a machine with two cores and four times their capacity in work, 35 of 89 healthy trainings had a
shift of 5 % for 50 steps, and 24 had one of 20 %; none lost five seconds.

An info: steps naturally take longer with a larger batch or a longer sequence. On a shared machine,
step times depend on other programs, so the info waits while the node's CPU is overloaded. It is a
warning only if steps take more than twice as long, ten minutes are lost, and not only the model's
own work (forward and backward) has grown, as it does with larger batches. The branch names the part
of a step that has grown most, measured by the clock of the training thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import StepFrame, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event
from tocsin.stream_rules.signals.cpu_contention import SYSTEM, CpuContention
from tocsin.stream_rules.signals.step_time_breakdown import INPUTS, PARTS, lowest_rank_breakdown

_SETTLE: Final = 10
_BLOCKS: Final = 200
_NEW_LEVEL: Final = 2000
_GRAVE_FACTOR: Final = 2.0
_GRAVE_S: Final = 600.0
_ALIKE: Final = 0.5
_WORDS: Final = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "optimizer": "the optimizer",
    "checkpoint": "writing checkpoints",
    "rest": "the rest of the loop",
    "all_parts": "each part of the step",
}


class ThroughputRegressionParams(Params):
    """Parameters of `throughput_regression`."""

    percent: float = Field(default=20.0, gt=0)
    """How much longer a step must take. Unit: percent of the usual step time."""
    warmup_steps: int = Field(default=100, ge=20)
    """Number of steps for the first usual step time. Unit: steps."""
    for_steps: int = Field(default=50, ge=10)
    """How long it must last. Unit: steps."""
    least: Duration = Field(default=timedelta(seconds=5), examples=["5s"])
    """Minimum time lost in total. Unit: a duration."""
    block: int = Field(default=10, ge=1)
    """Number of steps for a median. Unit: steps."""


def _parts() -> Doubles:
    return np.zeros((0, len(PARTS)))


@dataclass(slots=True)
class _Since:
    """Steps are slower since then."""

    step: int
    ms: int
    blocks: StateArray = field(default_factory=_parts)
    count: int = 0
    """How many steps."""
    reported: bool = False
    back: int = 0


@dataclass(slots=True)
class _State:
    rank: int | None = None
    last_step: int = -1
    seen: int = 0
    block: StateArray = field(default_factory=_parts)
    block_step: int = 0
    block_ms: int = 0
    usual: StateArray = field(default_factory=_parts)
    """Medians of the parts, by block; `totals` has those of the whole steps."""
    learned: int = 0
    """Steps of the usual time so far; of a state of an earlier release, those since then."""
    totals: StateArray = field(default_factory=lambda: np.zeros(0))
    cusum: float = 0.0
    since: _Since | None = None
    since_totals: StateArray = field(default_factory=lambda: np.zeros(0))
    medians: PointHistory = field(default_factory=PointHistory)
    contention: CpuContention = field(default_factory=CpuContention)


class ThroughputRegression(Rule[ThroughputRegressionParams, _State]):
    """An info; a warning if it is large and expensive and larger batches do not explain it."""

    meta = RuleMeta(
        name="throughput_regression",
        version=2,
        family="progress",
        meaning="Steps take longer than before in this run, and stay slower.",
        severity="info",
        inputs=(*INPUTS, *SYSTEM, event(RunStarted, optional=True)),
        available="maybe",
        capture_hint="the time of steps is captured when a PyTorch optimizer steps",
        remedy="Check which part of the step has grown: the data loader, the file system, a "
        "throttled GPU, another program on the node, or a larger batch.",
        does_not_see="A run that is slow from the start, and slower steps on a node with an "
        "overloaded CPU, unless they are a warning. The amount of work in a step: twice the batch "
        "in twice the time is reported as slower steps.",
        branches={name: f"What has grown most is {words}." for name, words in _WORDS.items()},
        params=ThroughputRegressionParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        rank, parts = frame.origin.rank, lowest_rank_breakdown(frame, self.state.rank)
        if parts is None:
            return
        if rank != self.state.rank:
            self.state = _State(rank=rank, contention=self.state.contention)
        state = self.state
        for step, row in zip(frame.steps.tolist(), parts, strict=True):
            if step <= state.last_step:
                continue
            state.last_step = step
            state.seen += 1
            if state.seen <= _SETTLE or not np.isfinite(row[-1]):
                continue
            if not len(state.block):
                state.block_step, state.block_ms = step, at.now_ms
            state.block = np.vstack([state.block, row])
            if len(state.block) >= self.params.block:
                block, state.block = state.block, _parts()
                yield from self._evaluate(step, block)

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        self.state.contention.add_start(data)
        return ()

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        self.state.contention.add(frame, at.now_ms)
        return ()

    def _evaluate(self, step: int, block: Doubles) -> Outcomes:
        state, params = self.state, self.params
        total = float(np.median(block.sum(axis=1)))
        parts = np.median(block, axis=0)
        state.medians.append(state.block_step, total)
        if max(state.learned, len(state.totals) * params.block) < params.warmup_steps:
            self._learn(parts[None], np.array([total]))
            return
        usual = float(np.median(state.totals))
        if usual <= 0 or total <= 0:
            return
        allowance = math.log1p(params.percent / 100) / 2
        state.cusum = max(0.0, state.cusum + math.log(total / usual) - allowance)
        since = state.since
        if since is None and state.cusum == 0.0:
            self._learn(parts[None], np.array([total]))
            return
        if since is None:
            since = state.since = _Since(state.block_step, state.block_ms)
            state.since_totals = np.zeros(0)
        since.blocks = np.vstack([since.blocks, parts])[-_BLOCKS:]
        state.since_totals = np.append(state.since_totals, total)[-_BLOCKS:]
        since.count += len(block)
        back = total < usual * math.exp(allowance)
        since.back = since.back + len(block) if back else 0
        if since.back >= params.for_steps or (state.cusum == 0.0 and not since.reported):
            yield from self._over(step)
        else:
            yield from self._slower(step, usual, since)

    def _slower(self, step: int, usual: float, since: _Since) -> Outcomes:
        params, state = self.params, self.state
        level = float(np.median(state.since_totals))
        lost = (level - usual) * since.count
        holds = (
            since.count >= params.for_steps
            and level > usual * (1 + params.percent / 100)
            and lost >= params.least / timedelta(seconds=1)
        )
        if holds and since.back == 0:
            finding = self._finding(usual, level, lost, since)
            if (
                finding.severity is not None
                or since.reported
                or not state.contention.since(since.ms)
            ):
                since.reported = True
                yield finding
        if since.count >= max(_NEW_LEVEL, 2 * params.for_steps):
            state.usual, state.totals, state.learned = _parts(), np.zeros(0), 0
            yield from self._over(step)

    def _over(self, step: int) -> Outcomes:
        """It is over: what came since is usual, too."""
        state = self.state
        since, state.since, state.cusum = state.since, None, 0.0
        if since is None:
            return
        if since.reported:
            yield Clear(step)
        kept = len(state.since_totals) if not since.reported or not len(state.totals) else 0
        self._learn(since.blocks[:kept], state.since_totals[:kept])
        state.since_totals = np.zeros(0)

    def _learn(self, parts: Doubles, totals: Doubles) -> None:
        state = self.state
        state.learned += len(totals) * self.params.block
        state.usual = np.vstack([state.usual, parts])[-_BLOCKS:]
        state.totals = np.append(state.totals, totals)[-_BLOCKS:]

    def _finding(self, usual: float, level: float, lost: float, since: _Since) -> Finding:
        state, params = self.state, self.params
        before, after = np.median(state.usual, axis=0), np.median(since.blocks, axis=0)
        branch = _grown(before, after, level / usual)
        grave = level >= _GRAVE_FACTOR * usual and lost >= _GRAVE_S and branch != "compute"
        limit = usual * (1 + params.percent / 100)
        return Finding(
            branch=branch,
            subject=Subject(kind="scalar", name="step_time_s"),
            reason=f"a step takes {1000 * level:,.4g} ms, {100 * (level / usual - 1):,.0f} % more "
            f"than the usual {1000 * usual:,.4g} ms, since step {since.step}; what has grown is "
            f"{_WORDS[branch]}",
            first_step=since.step,
            first_rank=state.rank,
            onset_ms=since.ms,
            severity="warning" if grave else None,
            facts=(
                fact("step_time", level, limit=limit, unit="s"),
                fact("usual_step_time", usual, unit="s"),
                fact("time_lost", lost, unit="s"),
                *(
                    fact(f"{name}_more", after[j] - before[j], unit="s")
                    for j, name in enumerate(PARTS)
                ),
            ),
            series=state.medians.series(
                f"step time (medians of {params.block})", unit="s", limit=limit
            ),
            explanation="without the time of evaluations, on the clock of the training thread",
        )


def _grown(before: Doubles, after: Doubles, times: float) -> str:
    """Which part has grown most; `all_parts` where the optimizer, whose work is always the same,
    has grown like the rest: then the machine is slower."""
    optimizer, compute = PARTS.index("optimizer"), PARTS.index("compute")
    if before[optimizer] > 0 and before[compute] > 0:
        least = 1 + _ALIKE * (times - 1)
        ratios = after[[optimizer, compute]] / before[[optimizer, compute]]
        if bool((ratios > least).all()):
            return "all_parts"
    return PARTS[int(np.argmax(after - before))]
