"""`loss_not_decreasing`: a run has not learned anything, or loses what it had learned.

The rule checks once the run has `num_steps` losses, and each time that number has grown by half:

- flat: the median of the last third is not below the median of the first third, neither by
  `diff_percent` of its size nor by half the standard error of the two. A run whose loss has fallen
  by 5 % since its first 20 losses is never flat again: most runs end on a plateau.
- rising: the median of the last third exceeds the lowest so far by `increase_threshold_percent` of
  its size or of the drop until then, whichever is larger.

Either must be true `patience` consecutive times. Three kinds of losses do not measure progress and
are not checked: losses of both signs, as in policy gradients; those of several optimizers with
separate losses; and those of a model that acts in an environment, whose errors grow with the values
that it reaches. A run is `stuck` if its loss fell by less than 2 %: the drop between the first and
last third, plus two standard errors, is below 2 % in two consecutive checks, although the weights
have moved by at least a tenth of their size (the sum over the steps of the median ratio of update
to weight). These checks are made earlier, every 50 losses from the 50th on, and only for a run that
has started from scratch with a fresh optimizer: a resumed run may be on its plateau. Losses that
are ever negative, and runs with several losses, are not checked. Of 22 healthy programs with up to
eight seeds, the loss of the slowest had fallen by 7.8 % at 60 losses, when its weights had moved
that far, and by 33 % at 100. Fine-tuning with a learning rate of 1e-6 had moved the weights by
0.003. With shuffled labels, the loss had fallen by 0.4 % at 100, and the weights had moved by 0.2.

SageMaker Debugger's rule compares with the loss ten steps ago and fires on each of 75 public GPT
trainings, all of which completed. This rule fires on none of them. Started at 136 points in the
middle, as if resumed there, it fires on 2. Of constant noisy losses it reports 83 % within ten
times `num_steps`.

With `against: before`, as in the preset `sagemaker`, the condition is the one of SageMaker
Debugger: every `num_steps` steps, a loss is compared with the newest one that is as many steps
older. It is flat if it is not lower by `diff_percent`, and rising if it is higher by more than
`increase_threshold_percent`. Both are for migration only: healthy runs also meet them.

With `mode: eval`, each evaluation is one loss: the mean over its batches, once it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Series, Subject
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar
from tocsin.stream_rules.signals import warm_start
from tocsin.stream_rules.signals.evaluations import Evaluation, Evaluations
from tocsin.stream_rules.signals.lagged_loss import LaggedLoss
from tocsin.stream_rules.signals.step_losses import StepLosses
from tocsin.stream_rules.signals.warm_start import WarmStart

_BUCKETS: Final = 512
_GROWTH: Final = 1.5
_SIGNIFICANT: Final = 0.5
_LEARNED: Final = 0.05
_FIRST: Final = 20
_EARLY: Final = 50
_EARLY_CHECKS: Final = 2
"""Looks for a run that is stuck: how many losses apart, and how many in a row."""


class LossNotDecreasingParams(Params):
    """Parameters of `loss_not_decreasing`."""

    num_steps: int = Field(default=400, ge=1)
    """Number of losses before the first check; with `against: before`, also the distance of the
    compared losses. Unit: losses; with `against: before`, steps."""
    diff_percent: float = Field(default=0.1, ge=0, lt=100)
    """What counts as a fall. Unit: percent of the loss."""
    increase_threshold_percent: float = Field(default=5.0, gt=0)
    """What counts as a rise. Unit: percent of the loss, or of its fall until then."""
    patience: int = Field(default=4, ge=1)
    """How many consecutive checks must agree."""
    mode: Literal["train", "eval"] = "train"
    """Which losses."""
    stuck_percent: float = Field(default=2.0, ge=0, lt=100)
    """Minimum decrease in the first steps; 0 switches the early check off. Unit: percent of the
    loss."""
    moved: float = Field(default=0.1, gt=0)
    """How far the weights must have moved for a run to count as stuck. Unit: multiples of their
    norm."""
    against: Literal["beginning", "before"] = "beginning"
    """What is compared: the run with its start, or a loss with the one `num_steps` before."""


@dataclass(slots=True)
class _State:
    rank: int | None = None
    last_step: int = -1
    first_step: int = 0
    first_ms: int = 0
    count: int = 0
    width: int = 1
    buckets: list[float] = field(default_factory=list)
    bucket_steps: list[int] = field(default_factory=list)
    filling: float = 0.0
    filled: int = 0
    next_look: int = 0
    has_learned: bool = False
    start: float = 0.0
    best: float | None = None
    begin: float = 0.0
    flat: int = 0
    rising: int = 0
    rising_step: int = 0
    losses: StepLosses = field(default_factory=StepLosses)
    before: LaggedLoss = field(default_factory=LaggedLoss)
    warm_start: WarmStart = field(default_factory=WarmStart)
    evaluations: Evaluations = field(default_factory=Evaluations)
    lowest: float = math.inf
    highest: float = -math.inf
    early: int = 0
    stuck: bool = False


class LossNotDecreasing(Rule[LossNotDecreasingParams, _State]):
    """A warning; you decide whether to continue the run."""

    meta = RuleMeta(
        name="loss_not_decreasing",
        version=2,
        family="progress",
        meaning="The loss has not fallen since the run started, or has been rising for a long "
        "time.",
        severity="warning",
        inputs=(scalar("loss"), scalar("loss", mode="eval"), *warm_start.INPUTS),
        capture_hint="the loss is captured when backward() is called on it; otherwise log it with "
        "run.log as 'loss'",
        remedy="Check that the optimizer has all parameters and a learning rate above zero, that "
        "labels match their inputs, and that gradients arrive; then try a higher rate.",
        alias="LossNotDecreasing",
        params=LossNotDecreasingParams,
        branches={
            "flat": "The loss has not fallen.",
            "stuck": "The loss has not fallen in the first steps of a new run, although its "
            "weights move.",
            "rising": "The loss has been rising.",
        },
        presets={
            "sagemaker": {
                "num_steps": 10,
                "diff_percent": 0.1,
                "increase_threshold_percent": 5.0,
                "patience": 1,
                "against": "before",
            }
        },
        does_not_see="A plateau after the run has learned something: most runs end on one. Losses "
        "of several optimizers with a backward call each, which work against each other, and "
        "losses of both signs, which do not measure progress, as with policy gradients, and "
        "the loss of reinforcement learning. A run resumed from a checkpoint, before `num_steps` "
        "losses; a run of less than 100 losses.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        self.state.warm_start.add_start(data)
        if self.params.mode == "eval":
            for evaluation in self.state.evaluations.end(data, at):
                yield from self._evaluated(evaluation, at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if self.params.mode == "train" and self.params.against == "beginning":
            self.state.warm_start.add(frame)
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        if self.params.mode == "eval":
            for evaluation in self.state.evaluations.complete(frame, at):
                yield from self._evaluated(evaluation, at)
            return
        rank = frame.origin.rank
        if frame.mode != "train" or frame.column("loss") is None:
            return
        if self.state.rank is not None and rank > self.state.rank:
            return
        self._follow(rank)
        if self._measures_no_progress(at):
            return
        losses = self.state.losses.losses(frame)
        for step, loss in zip(frame.steps.tolist(), losses, strict=True):
            yield from self._add_loss(step, loss, at.now_ms, at)

    def _evaluated(self, evaluation: Evaluation, at: Moment) -> Outcomes:
        self._follow(self.state.evaluations.rank)
        if not self._measures_no_progress(at):
            yield from self._add_loss(evaluation.step, evaluation.loss, evaluation.at_ms, at)

    def _follow(self, rank: int | None) -> None:
        """The losses of another rank begin from nothing."""
        state = self.state
        if rank != state.rank:
            self.state = _State(
                rank=rank,
                next_look=self.params.num_steps,
                warm_start=state.warm_start,
                evaluations=state.evaluations,
            )

    def _measures_no_progress(self, at: Moment) -> bool:
        return (at.run.acts or at.run.one_loss is False) and self.params.against == "beginning"

    def _add_loss(self, step: int, loss: float, at_ms: int, at: Moment) -> Outcomes:
        state = self.state
        if step <= state.last_step or not math.isfinite(loss):
            return
        if state.count == 0:
            state.first_step, state.first_ms = step, at_ms
        state.last_step = step
        if self.params.against == "before":
            yield from self._inspect_past(step, loss)
            return
        self._add(step, loss)
        due = state.count >= state.next_look
        if due or state.count % _EARLY == 0:
            yield from self._inspect_early(step, at)
        if due:
            state.next_look = math.ceil(state.next_look * _GROWTH)
            yield from self._inspect(step)

    def _inspect_past(self, step: int, loss: float) -> Outcomes:
        """The condition against an earlier loss."""
        params, before = self.params, self.state.before
        seen = before.add(
            step,
            loss,
            num_steps=params.num_steps,
            diff_percent=params.diff_percent,
            increase_percent=params.increase_threshold_percent,
        )
        if seen is None:
            return
        for why in ("rising", "flat"):
            if seen.why != why:
                yield Clear(step, about=why)
        if seen.why == "falling" or seen.row < params.patience:
            return
        word = "risen" if seen.why == "rising" else "not fallen"
        yield Finding(
            about=seen.why,
            branch=seen.why,
            subject=Subject(kind="loss", name="loss"),
            reason=f"the loss has {word}: {loss:.4g} at step {step} after {seen.before:.4g} at "
            f"step {seen.before_step}",
            first_step=seen.first_step,
            first_rank=self.state.rank,
            facts=(
                fact("reason", seen.why),
                fact("loss", loss, limit=seen.limit),
                fact("before", seen.before),
                fact("looks", seen.row, limit=params.patience),
            ),
            series=before.losses.series("loss", limit=seen.limit),
        )

    def _inspect_early(self, step: int, at: Moment) -> Outcomes:
        """Whether the run is stuck where it began."""
        state, params = self.state, self.params
        if state.has_learned or params.mode != "train":
            return
        third = max(1, len(state.buckets) // 3)
        begin, begin_error = _median(state.buckets[:third])
        now, now_error = _median(state.buckets[-third:])
        start, error = _median(state.buckets[:_FIRST])[0], math.hypot(begin_error, now_error)
        state.has_learned = start - now > max(_LEARNED * abs(start), 4 * error)
        needed = params.stuck_percent / 100 * abs(begin)
        holds = state.lowest > 0 and begin - now + 2 * error < needed and not state.has_learned
        state.early = state.early + 1 if holds else 0
        if not holds and state.stuck:
            state.stuck = False
            yield Clear(step, about="flat")
        moved = state.warm_start.moved(step - state.first_step)
        certain = at.run.one_loss is True and moved >= params.moved and state.warm_start.is_new()
        if holds and state.early >= _EARLY_CHECKS and (state.stuck or certain):
            state.stuck, state.begin = True, begin
            finding = self._finding("flat", now, begin - needed)
            facts = (*finding.evidence.facts, fact("moved", moved, limit=params.moved))
            yield replace(
                finding,
                branch="stuck",
                reason=f"the loss has not fallen in {state.count:,} losses: the median is "
                f"{now:.4g}, {begin:.4g} at the beginning, though the weights have moved by "
                f"{100 * moved:.0f} % of their norm",
                evidence=finding.evidence.model_copy(update={"facts": facts}),
            )

    def _add(self, step: int, loss: float) -> None:
        """Keep the run's losses as at most 512 means over equal lengths."""
        state = self.state
        state.count += 1
        state.lowest, state.highest = min(state.lowest, loss), max(state.highest, loss)
        if state.filled == 0:
            state.bucket_steps.append(step)
        state.filling += loss
        state.filled += 1
        if state.filled < state.width:
            return
        state.buckets.append(state.filling / state.width)
        state.filling, state.filled = 0.0, 0
        if len(state.buckets) == _BUCKETS:
            pairs = np.asarray(state.buckets).reshape(-1, 2)
            state.buckets = pairs.mean(axis=1).tolist()
            state.bucket_steps = state.bucket_steps[::2]
            state.width *= 2

    def _inspect(self, step: int) -> Outcomes:
        state, params = self.state, self.params
        if state.lowest < 0 < state.highest:
            return
        third = max(1, len(state.buckets) // 3)
        begin, begin_error = _median(state.buckets[:third])
        now, now_error = _median(state.buckets[-third:])
        error = math.hypot(begin_error, now_error)
        needed = max(params.diff_percent / 100 * abs(begin), _SIGNIFICANT * error)
        if state.best is None:
            state.best = state.begin = begin
            state.start = _median(state.buckets[:_FIRST])[0]
        learned = max(_LEARNED * abs(state.start), 4 * error)
        state.has_learned |= state.start - now > learned
        fallen = state.has_learned or begin - now > needed
        state.flat = 0 if fallen else state.flat + 1
        size = max(abs(state.best), state.begin - state.best)
        limit = state.best + params.increase_threshold_percent / 100 * size
        if now > limit + error:
            state.rising += 1
            if state.rising == 1:
                state.rising_step = step
        else:
            state.rising = 0
        state.best = min(state.best, now)
        if state.rising >= params.patience:
            yield self._finding("rising", now, limit)
        elif state.flat >= params.patience:
            yield self._finding("flat", now, begin - needed)
        if state.rising < params.patience:
            yield Clear(step, about="rising")
        if state.flat < params.patience and not state.stuck:
            yield Clear(step, about="flat")

    def _finding(self, why: Literal["flat", "rising"], now: float, limit: float) -> Finding:
        state = self.state
        first = state.first_step if why == "flat" else state.rising_step
        reason = (
            f"the loss has not fallen in {state.count:,} losses: the median is {now:.4g}, "
            f"{state.begin:.4g} at the beginning"
            if why == "flat"
            else f"the loss has been rising since step {first}: the median is {now:.4g} after "
            f"{state.best:.4g}"
        )
        return Finding(
            about=why,
            branch=why,
            subject=Subject(kind="loss", name="loss"),
            reason=reason,
            first_step=first,
            first_rank=state.rank,
            onset_ms=state.first_ms if why == "flat" else None,
            facts=(
                fact("reason", why),
                fact("median", now, limit=limit),
                fact("beginning", state.begin),
                fact("lowest", state.best if state.best is not None else now),
            ),
            series=self._series(limit),
            explanation="medians of the first and the last third of the run, checked each "
            "time the run has grown by half",
        )

    def _series(self, limit: float) -> Series:
        """The whole run, thinned."""
        state = self.state
        every = math.ceil(len(state.buckets) / SERIES_POINTS)
        kept = range(0, len(state.buckets), every)
        return Series(
            name="loss (means)",
            steps=tuple(state.bucket_steps[i] for i in kept),
            values=tuple(state.buckets[i] for i in kept),
            limit=limit,
        )


def _median(values: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error from the median absolute deviation."""
    array = np.asarray(values)
    middle = float(np.median(array))
    spread = 1.4826 * float(np.median(np.abs(array - middle)))
    return middle, 1.2533 * spread / math.sqrt(len(array))
