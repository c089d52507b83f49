"""`evaluation_in_train_mode`: dropout and batch normalisation are in the wrong mode.

- `evaluation_in_train_mode`: a loss is computed without gradients, or a data loader gives batches
  that no backward call follows, and layers with dropout or batch normalisation are then called in
  train mode. The results are then noisy, and batch normalisation learns from the test data.
- `training_in_eval_mode`: `for_steps` steps of training with all of these layers in `eval()`. If
  they were in train mode before, an evaluation did not switch back to `train()`. If they never
  were, and the model only has batch normalisation, it is an info: freezing its statistics is
  common.

Both are facts that the training process sees: the calls of the layers, and `module.training`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.program_facts import ModeSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar

EVALUATION = "evaluation_in_train_mode"
TRAINING = "training_in_eval_mode"


class EvaluationInTrainModeParams(Params):
    """Parameters of `evaluation_in_train_mode`."""

    for_steps: int = Field(default=5, ge=1)
    """Number of training steps in `eval()`. Unit: steps."""


@dataclass(slots=True)
class _State:
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    rank: int | None = None
    trained: bool = False
    since: int | None = None
    layers: int = 0
    first: str = ""
    kind: str = ""


class EvaluationInTrainMode(Rule[EvaluationInTrainModeParams, _State]):
    """One episode for each branch."""

    meta = RuleMeta(
        name="evaluation_in_train_mode",
        version=1,
        family="data",
        meaning="An evaluation runs in train mode, or the training in eval mode.",
        severity="warning",
        available="maybe",
        inputs=(event(ModeSeen), scalar("step_time_s", optional=True)),
        capture_hint="the modes of dropout and batch normalisation are captured if the model has "
        "such layers, and if its evaluations compute a loss or use a data loader",
        remedy="Call model.eval() before an evaluation and model.train() after it.",
        does_not_see="An evaluation without a PyTorch loss and without its own data loader, an "
        "evaluation of a compiled model, and dropout that is called as a function.",
        params=EvaluationInTrainModeParams,
        branches={
            "evaluation_in_train_mode": "An evaluation runs with layers in train mode.",
            "training_in_eval_mode": "Training runs with all of them in `eval()`.",
        },
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        if not isinstance(data, ModeSeen) or (state.rank is not None and data.rank > state.rank):
            return
        if data.rank != state.rank:
            self.state = state = _State(rank=data.rank)
        if data.doing == "evaluation":
            if data.layers_in == "train":
                yield self._finding(data.step, EVALUATION, data.layers, data.first, data.kind)
            else:
                yield Clear(data.step, about=EVALUATION)
        elif data.layers_in == "train":
            state.trained, state.since = True, None
            yield Clear(data.step, about=TRAINING)
        elif state.since is None:
            state.since = data.step
            state.layers, state.first, state.kind = data.layers, data.first, data.kind

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        if not state.rank_series.accepts(frame) or not len(frame.steps):
            return
        last = int(frame.steps[-1])
        state.rank_series.last_step = max(state.rank_series.last_step, last)
        if state.since is None:
            return
        if last - state.since + 1 >= self.params.for_steps:
            yield self._finding(state.since, TRAINING, state.layers, state.first, state.kind)
        else:
            yield Holds(last, about=TRAINING)

    def _finding(self, step: int, branch: str, layers: int, first: str, kind: str) -> Finding:
        what = (
            f"{layers} layers with dropout or batch normalisation, the first {first}"
            if layers > 1
            else f"{first} is a {kind}"
        )
        reason = (
            f"an evaluation after step {step} calls the model in train mode: {what}"
            if branch == EVALUATION
            else f"the model has been trained in eval mode since step {step}: {what}"
        )
        freezes = branch == TRAINING and not self.state.trained and "BatchNorm" in kind
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="layer", name=first),
            reason=reason,
            first_step=step,
            first_rank=self.state.rank,
            severity="info" if freezes else None,
            facts=(
                fact("layers", layers),
                fact("class", kind),
            ),
            explanation="the `training` flag of the layers when they were called",
        )
