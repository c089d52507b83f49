"""`overfit`: the evaluation loss is far above the training loss and no longer improves.

Let T be the mean training loss over the last 100 steps before an evaluation, and V the mean
evaluation loss. The condition is (V - T) / max(abs(T), eps) > `ratio_threshold`, in `patience`
consecutive evaluations, or in `patience_share` of all evaluations so far, if that is more. In all
of them V must also exceed the lowest V so far by more than `least_percent` of it, and by more than
twice the median change from one evaluation to the next. While the learning rate has only risen, the
run is in its warm-up, and its evaluations do not count. With a patience of three, four of twelve
warnings of public trainings were wrong: in the warm-up (an evaluation loss of 22 after 11, and of
4.0 at the end), and at the epochs 10, 21 and 31, all of which improved afterwards. Every model that
has learned its data has a gap, which SageMaker Debugger's rule reports as overfitting at the first
evaluation. A plateau is above its own lowest point, too: of 120 small healthy trainings, with and
without a schedule, 31 ended with their last evaluations 1 % above the best, and one meets the
condition. The losses of several optimizers with separate backward calls work against each other and
are not checked.

With `rising: false`, which the preset `sagemaker` has, the gap alone is the condition, as SageMaker
Debugger documents it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar
from tocsin.stream_rules.signals.evaluations import Evaluation, Evaluations
from tocsin.stream_rules.signals.streaks import Streak

_EPSILON: Final = 1e-6
_CHANGES: Final = 10
"""Newest changes between evaluations that show how much they scatter."""
_SCATTER: Final = 2.0


class OverfitParams(Params):
    """Parameters of `overfit`."""

    ratio_threshold: float = Field(default=0.1, ge=0)
    """How far the evaluation loss is above the training loss. Unit: share of the training loss."""
    patience: int = Field(default=5, ge=1)
    """Minimum number of consecutive evaluations. Unit: evaluations."""
    patience_share: float = Field(default=0.2, ge=0, lt=1)
    """Share of all evaluations so far, if that is more. Unit: share of the evaluations."""
    least_percent: float = Field(default=5.0, ge=0)
    """Minimum distance of the evaluation loss above its best. Unit: percent of the best."""
    rising: bool = True
    """Whether the evaluation loss must have risen, too; false: the gap alone is enough."""
    start_step: int = Field(default=0, ge=0)
    """Evaluations before this step do not count. Unit: steps."""


@dataclass(slots=True)
class _State:
    evaluations: Evaluations = field(default_factory=Evaluations)
    best: float | None = None
    best_step: int = 0
    over: Streak = field(default_factory=Streak)
    count: int = 0
    """Evaluations after the warm-up."""
    rate: float | None = None
    """The newest learning rate of the first group."""
    rate_before: float | None = None
    """The one at the evaluation before, or the run's first."""
    warm: bool = False
    """Whether the warm-up is over."""


class Overfit(Rule[OverfitParams, _State]):
    """A warning. It names the best evaluation: keep its checkpoint."""

    meta = RuleMeta(
        name="overfit",
        version=3,
        family="progress",
        meaning="The evaluation loss rises while it is well above the training loss.",
        severity="warning",
        available="later",
        inputs=(
            scalar("loss", mode="eval"),
            scalar("loss", optional=True),
            scalar("lr.0", optional=True),
        ),
        capture_hint="evaluation losses are losses computed without a gradient, by a loss module, "
        "or by a function of torch.nn.functional while the model is in eval()",
        remedy="Go back to the best evaluation named here; stop earlier, add data, augmentation, "
        "dropout or weight decay, or use a smaller model.",
        alias="Overfit",
        params=OverfitParams,
        presets={
            "sagemaker": {
                "ratio_threshold": 0.1,
                "patience": 1,
                "patience_share": 0.0,
                "start_step": 0,
                "rising": False,
            },
        },
        does_not_see="Overfitting that the loss does not show, an accuracy that falls while the "
        "loss still improves, and evaluations that compute no loss.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        self._add_rates(frame)
        for evaluation in self.state.evaluations.complete(frame, at):
            yield from self._evaluate(evaluation, at)

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        for evaluation in self.state.evaluations.end(data, at):
            yield from self._evaluate(evaluation, at)

    def _evaluate(self, evaluation: Evaluation, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        if params.rising and at.run.one_loss is False:
            return
        loss, train = evaluation.loss, evaluation.train
        if params.rising and self._is_warming_up():
            return
        state.count += 1
        if state.best is None or loss < state.best:
            state.best, state.best_step = loss, evaluation.step
            if params.rising:
                state.over = Streak()
                yield Clear()
                return
        if train is None or evaluation.step < params.start_step:
            return
        ratio = (loss - train) / max(abs(train), _EPSILON)
        high = ratio > params.ratio_threshold
        if not state.over.update(evaluation.step, evaluation.at_ms, holds=high):
            yield Clear()
            return
        if state.over.length < self._patience():
            return
        if not params.rising or self._has_risen(state.best):
            yield self._finding(loss, train, state.best, ratio)

    def _patience(self) -> int:
        """How many evaluations in a row it takes now."""
        params = self.params
        return max(params.patience, math.ceil(params.patience_share * self.state.count))

    def _add_rates(self, frame: StepFrame) -> None:
        rates = frame.column("lr.0")
        if rates is None or frame.mode != "train" or frame.origin.rank != 0:
            return
        state = self.state
        for rate in rates.tolist():
            state.warm = state.warm or (state.rate is not None and rate < state.rate)
            state.rate = rate
            if state.rate_before is None:
                state.rate_before = rate

    def _is_warming_up(self) -> bool:
        """Whether the learning rate has only risen until now."""
        state = self.state
        rate, before = state.rate, state.rate_before
        state.warm = state.warm or rate is None or before is None or rate <= before
        state.rate_before = rate
        return not state.warm

    def _has_risen(self, best: float) -> bool:
        """Whether the last evaluations are all further above the best than they scatter."""
        losses = self.state.evaluations.losses.values
        newest = losses[-_CHANGES - 1 :]
        scatter = median(abs(b - a) for a, b in pairwise(newest))
        least = max(self.params.least_percent / 100 * abs(best), _SCATTER * scatter)
        return min(losses[-self._patience() :]) - best > least

    def _finding(self, loss: float, train: float, best: float, ratio: float) -> Finding:
        state = self.state
        return Finding(
            subject=Subject(kind="loss", name="loss"),
            reason=f"the evaluation loss is {loss:.4g}, {100 * ratio:,.0f} % above the training "
            f"loss of {train:.4g}; its best was {best:.4g} at step {state.best_step}",
            first_step=state.over.first_step,
            first_rank=state.evaluations.rank,
            onset_ms=state.over.first_ms,
            facts=(
                fact("ratio", ratio, limit=self.params.ratio_threshold),
                fact("evaluation_loss", loss, limit=best),
                fact("training_loss", train),
                fact("best_step", state.best_step),
                fact("evaluations", state.over.length),
            ),
            series=state.evaluations.series("evaluation loss", limit=best),
            explanation="the training loss is the mean of the last 100 steps before each "
            "evaluation",
        )
