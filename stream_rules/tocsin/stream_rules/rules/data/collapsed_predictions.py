"""`collapsed_predictions`: the model gives the same answer for every input.

- `constant`: in `for_looks` consecutive checks of the loss inputs, the scores of all samples of a
  batch are the same: their standard deviation over the samples is below 1e-6 of their size. Only
  the last bias of the model has an effect; the inputs do not reach the output (dead ReLUs, weights
  of zero). Checks with identical inputs are ignored.
- `one_class`: at least `share` of the predictions have the same class, over `steps` steps of
  training or in `evaluations` consecutive evaluations, while that class makes up at most
  `label_share` of the labels. Many healthy models do this in their first steps: records that start
  before `start_step` are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.program_facts import LayerInputsSeen, LossInputsSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, RuleMeta, event, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.loss_inputs import leading_loss_inputs

_SAME: Final = 1e-6
_ROWS: Final = 4
_SAMPLES: Final = 64


class CollapsedPredictionsParams(Params):
    """Parameters of `collapsed_predictions`."""

    for_looks: int = Field(default=6, ge=1)
    """Consecutive checks with identical scores. Unit: looks."""
    share: float = Field(default=0.995, gt=0.5, le=1)
    """Share of the predictions of one class. Unit: share."""
    label_share: float = Field(default=0.7, gt=0, lt=1)
    """Largest share of the labels of that class. Unit: share."""
    steps: int = Field(default=100, ge=1)
    """For how many steps predictions are of one class. Unit: steps."""
    start_step: int = Field(default=20, ge=0)
    """The first step that counts. Unit: steps."""
    evaluations: int = Field(default=3, ge=1)
    """Consecutive evaluations that predict one class. Unit: evaluations."""


@dataclass(slots=True)
class _Collapse:
    last_step: int = 0
    since: int | None = None
    records: int = 0


@dataclass(slots=True)
class _State(RowState):
    rank: int | None = None
    same: dict[str, int] = field(default_factory=dict)
    same_since: dict[str, int] = field(default_factory=dict)
    same_step: dict[str, int] = field(default_factory=dict)
    inputs_same: bool = False
    modes: dict[str, _Collapse] = field(default_factory=dict)


class CollapsedPredictions(TensorRowRule[CollapsedPredictionsParams, _State]):
    """One episode for each branch, in training and in evaluations."""

    meta = RuleMeta(
        name="collapsed_predictions",
        version=1,
        family="data",
        meaning="The model gives the same answer for all samples.",
        severity="warning",
        available="maybe",
        inputs=(
            event(LossInputsSeen),
            tensors("labels", mode=None),
            event(LayerInputsSeen, optional=True),
        ),
        capture_hint="predictions are captured if the loss is one of torch.nn.functional, or if "
        "run.data(labels=…, predictions=…) names them",
        remedy="Check for dead activations, a learning rate that made the weights explode, and "
        "weights of zero; balance the classes if one of them is almost all of the data.",
        does_not_see="Constant answers of models whose loss is written by hand or compiled, and a "
        "collapse to few classes.",
        params=CollapsedPredictionsParams,
        branches={
            "constant": "The scores of all samples of a batch are the same.",
            "one_class": "Nearly all predictions are of one class.",
        },
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = False

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        if isinstance(data, LayerInputsSeen):
            state.inputs_same = data.sample_std == 0.0
        inputs = leading_loss_inputs(data, state.rank)
        if inputs is not None:
            yield from self._constant(inputs)

    def _constant(self, data: LossInputsSeen) -> Outcomes:
        state = self.state
        if data.rank != state.rank:
            self.state = state = _State(
                tables=state.tables,
                rank=data.rank,
                inputs_same=state.inputs_same,
                modes=state.modes,
            )
        if data.spread is None or data.rows < _ROWS:
            return
        key = data.function
        size = max(abs(data.minimum), abs(data.maximum))
        if not data.spread <= _SAME * size or state.inputs_same:
            state.same[key] = 0
            yield Clear(data.step, about=f"constant {key}")
            return
        if data.step <= state.same_step.get(key, -1):
            return  # another call of the same step
        state.same_step[key] = data.step
        if not state.same.get(key):
            state.same[key], state.same_since[key] = 0, data.step
        state.same[key] += 1
        if state.same[key] < self.params.for_looks:
            return
        yield Finding(
            about=f"constant {key}",
            branch="constant",
            subject=Subject(kind="loss", name=key),
            reason=f"{key} has received the same scores for all samples since step "
            f"{state.same_since[key]}: the inputs do not reach the output",
            first_step=state.same_since[key],
            first_rank=data.rank,
            facts=(
                fact("looks", state.same[key], limit=self.params.for_looks),
                fact("spread", data.spread),
                fact("smallest", data.minimum),
                fact("largest", data.maximum),
            ),
        )

    def table_key(self, frame: TensorFrame) -> str:
        return frame.mode

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        mode = table.mode
        if mode not in ("train", "eval"):
            return
        kept = self.state.modes.setdefault(mode, _Collapse())
        labels, predictions = table.count("labels"), table.count("predictions")
        began, kept.last_step = kept.last_step, table.step
        if labels is None or predictions is None:
            return
        all_labels, all_predictions = int(labels.sum()), int(predictions.sum())
        if all_predictions < _SAMPLES or not all_labels:
            return
        top = int(np.argmax(predictions))
        taken = float(predictions[top]) / all_predictions
        true = float(labels[top]) / all_labels
        about, params = f"one_class {mode}", self.params
        if taken < params.share or true > params.label_share:
            kept.since, kept.records = None, 0
            yield Clear(table.step, about=about)
            return
        if began < params.start_step:
            return
        if kept.since is None:
            kept.since = began
        kept.records += 1
        enough = (
            table.step - kept.since >= params.steps and kept.records > 1
            if mode == "train"
            else kept.records >= params.evaluations and table.step >= params.steps
        )
        if not enough:
            yield Holds(table.step, about=about)
            return
        where = "" if mode == "train" else " of the evaluations"
        yield Finding(
            about=about,
            branch="one_class",
            subject=Subject(kind="scalar", name="predictions"),
            reason=f"{100 * taken:.1f} % of the predictions{where} are class {table.rows[top]} "
            f"since step {kept.since}, which {100 * true:.1f} % of the labels are",
            first_step=kept.since,
            first_rank=table.origin.rank,
            facts=(
                fact("class", table.rows[top]),
                fact("predicted", taken, limit=params.share),
                fact("labelled", true, limit=params.label_share),
                fact("records", kept.records),
                fact("samples", all_predictions),
            ),
        )
