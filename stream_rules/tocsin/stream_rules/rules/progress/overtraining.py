"""`overtraining`: further training brings no improvement.

At each evaluation the rule checks two losses: the mean evaluation loss, and the mean training loss
of the last 100 steps before it. The issue fires when a loss has not improved on its best by more
than `delta` for its patience; each loss is a separate episode. Most runs end like this, so it is an
info: your budget decides what to do.

The preset `sagemaker` takes `delta` in units of the loss, as SageMaker Debugger documents it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar
from tocsin.stream_rules.signals.evaluations import Evaluation, Evaluations
from tocsin.stream_rules.signals.streaks import Streak


class OvertrainingParams(Params):
    """Parameters of `overtraining`."""

    patience_train: int = Field(default=5, ge=1)
    """For how many evaluations the training loss may not improve. Unit: evaluations."""
    patience_validation: int = Field(default=10, ge=1)
    """For how many evaluations the evaluation loss may not improve. Unit: evaluations."""
    delta: float = Field(default=0.01, ge=0)
    """Minimum improvement: a share of the best loss so far, unless `relative` is off."""
    relative: bool = True
    """Whether `delta` is a share of the best loss; false: it is in units of the loss."""


@dataclass(slots=True)
class _Loss:
    best: float | None = None
    best_step: int = 0
    worse: Streak = field(default_factory=Streak)
    values: PointHistory = field(default_factory=PointHistory)


@dataclass(slots=True)
class _State:
    evaluations: Evaluations = field(default_factory=Evaluations)
    losses: dict[str, _Loss] = field(default_factory=dict)


class Overtraining(Rule[OvertrainingParams, _State]):
    """An info, for each of the two losses."""

    meta = RuleMeta(
        name="overtraining",
        version=2,
        family="progress",
        meaning="The training loss or the evaluation loss has not improved for many evaluations.",
        severity="info",
        available="later",
        inputs=(scalar("loss", mode="eval"), scalar("loss", optional=True)),
        capture_hint="evaluation losses are losses computed without a gradient, by a loss module, "
        "or by a function of torch.nn.functional while the model is in eval()",
        remedy="Stop, or lower the learning rate: that usually brings one more improvement.",
        alias="Overtraining",
        params=OvertrainingParams,
        branches={
            "train": "The training loss has not improved.",
            "validation": "The evaluation loss has not improved.",
        },
        presets={
            "sagemaker": {
                "patience_train": 5,
                "patience_validation": 10,
                "delta": 0.01,
                "relative": False,
            }
        },
        does_not_see="A run without evaluations. A loss that scatters around its best counts as no "
        "improvement, which is usually correct.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        for evaluation in self.state.evaluations.complete(frame, at):
            yield from self._both(evaluation)

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        for evaluation in self.state.evaluations.end(data, at):
            yield from self._both(evaluation)

    def _both(self, evaluation: Evaluation) -> Outcomes:
        yield from self._evaluate(
            "validation", evaluation.loss, evaluation, self.params.patience_validation
        )
        if evaluation.train is not None:
            yield from self._evaluate(
                "train", evaluation.train, evaluation, self.params.patience_train
            )

    def _evaluate(
        self, which: str, value: float, evaluation: Evaluation, patience: int
    ) -> Outcomes:
        loss = self.state.losses.setdefault(which, _Loss())
        loss.values.append(evaluation.step, value)
        size = 1.0 if loss.best is None or not self.params.relative else abs(loss.best)
        better = loss.best is None or loss.best - value > self.params.delta * size
        since = loss.worse.update(evaluation.step, evaluation.at_ms, holds=not better)
        if loss.best is None or better:
            loss.best, loss.best_step = value, evaluation.step
            yield Clear(about=which)
        elif since >= patience:
            yield self._finding(which, value, loss.best, loss, patience)

    def _by(self) -> str:
        """By how much it had to improve."""
        delta = self.params.delta
        if not delta:
            return ""
        return f" by {100 * delta:.3g} %" if self.params.relative else f" by {delta:.3g}"

    def _finding(
        self, which: str, value: float, best: float, loss: _Loss, patience: int
    ) -> Finding:
        name = "evaluation loss" if which == "validation" else "training loss"
        return Finding(
            about=which,
            branch=which,
            subject=Subject(kind="loss", name="loss"),
            reason=f"the {name} has not improved{self._by()} for {loss.worse.length} evaluations: "
            f"it is {value:.4g}, and was {best:.4g} at step {loss.best_step}",
            first_step=loss.worse.first_step,
            first_rank=self.state.evaluations.rank,
            onset_ms=loss.worse.first_ms,
            facts=(
                fact("reason", which),
                fact("evaluations", loss.worse.length, limit=patience),
                fact("loss", value),
                fact("best", best),
                fact("best_step", loss.best_step),
            ),
            series=loss.values.series(name, limit=best),
        )
