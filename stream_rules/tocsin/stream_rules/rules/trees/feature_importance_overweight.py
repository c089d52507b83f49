"""`feature_importance_overweight`: a model relies on a few of its features.

The importances of all features are scaled to sum to 1. The condition is that the `nfeatures`
largest together exceed `threshold`, in `for_steps` consecutive checks, from `start_step` on: the
first trees naturally use few features. With fewer than `least_features` features it does not fire:
of four features, three have most of the weight in any model. SageMaker Debugger has no such limits.

Read from the collection `feature_importance`, one row for each feature, with the column
`importance` (gain, weight or cover), or from scalars: `run.log({f"feature_importance.{name}":
value, …})`. Importances that are negative or NaN count as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries
from tocsin.stream_rules.reading.tensor_rows import Doubles, doubles
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.streaks import Streak

COLLECTION: Final = "feature_importance"
_PREFIX: Final = f"log.{COLLECTION}."


class FeatureImportanceOverweightParams(Params):
    """Parameters of `feature_importance_overweight`."""

    nfeatures: int = Field(default=3, ge=1)
    """Number of the largest importances that are added. Unit: features."""
    threshold: float = Field(default=0.8, gt=0, le=1)
    """Largest allowed sum. Unit: share, 1 is all."""
    least_features: int = Field(default=10, ge=1)
    """With fewer features the rule does not fire. Unit: features."""
    start_step: int = Field(default=10, ge=0)
    """Earlier steps do not count. Unit: steps."""
    for_steps: int = Field(default=3, ge=1)
    """Consecutive checks. Unit: looks."""


@dataclass(slots=True)
class _State(RowState):
    shares: RankSeries = field(default_factory=RankSeries)
    rank: int | None = None
    streak: Streak = field(default_factory=Streak)


class FeatureImportanceOverweight(TensorRowRule[FeatureImportanceOverweightParams, _State]):
    """An info: a few features may contain all the information."""

    meta = RuleMeta(
        name="feature_importance_overweight",
        version=1,
        family="trees",
        meaning="A few features have most of the importance: the model hardly uses the others.",
        severity="info",
        inputs=(tensors(COLLECTION), scalar(f"{_PREFIX}*")),
        available="later",
        history_steps=0,
        capture_hint="importances are not captured by themselves: "
        'run.log({f"feature_importance.{name}": value, ...}) after some rounds',
        remedy="Check whether one of them leaks the answer (an id, a date, something known only "
        "afterwards); otherwise drop unused features, or sample columns for each tree.",
        does_not_see="Correlated features: they share their importance.",
        alias="FeatureImportanceOverweight",
        presets={
            "sagemaker": {
                "nfeatures": 3,
                "threshold": 0.8,
                "least_features": 1,
                "start_step": 0,
                "for_steps": 1,
            }
        },
        params=FeatureImportanceOverweightParams,
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = False
    columns = ("importance",)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        self.state.rank = table.origin.rank
        return self._evaluate(table.step, table.rows, doubles(table, "importance"), at)

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state, rank = self.state, frame.origin.rank
        if state.rank is not None and rank > state.rank:
            return
        state.rank = rank
        columns = [j for j, name in enumerate(frame.columns) if name.startswith(_PREFIX)]
        names = [frame.columns[j].removeprefix(_PREFIX) for j in columns]
        values = frame.values[:, columns].astype(np.float64)
        for step, row in zip(frame.steps.tolist(), values, strict=True):
            yield from self._evaluate(step, names, row, at)

    def _evaluate(self, step: int, names: Sequence[str], values: Doubles, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        weights = np.maximum(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), 0.0)
        total = float(weights.sum())
        if total <= 0 or len(weights) < max(params.least_features, params.nfeatures + 1):
            return
        order = np.argsort(-weights, kind="stable")[: params.nfeatures]
        share = float(weights[order].sum()) / total
        if step < params.start_step or not state.shares.add(step, share):
            return
        if not state.streak.update(step, at.now_ms, holds=share > params.threshold):
            yield Clear()
            return
        if state.streak.length < params.for_steps:
            yield Holds()
            return
        largest = [(names[i], weights[i] / total) for i in order.tolist()]
        listed = ", ".join(f"{name} {100 * part:.0f} %" for name, part in largest[:8])
        yield Finding(
            subject=Subject(kind="layer", name=largest[0][0], collection=COLLECTION),
            reason=f"{len(largest)} of {len(weights)} features have {100 * share:.0f} % of the "
            f"importance since step {state.streak.first_step}: {listed}",
            first_step=state.streak.first_step,
            first_rank=state.rank,
            onset_ms=state.streak.first_ms,
            facts=(
                fact("share", share, limit=params.threshold),
                fact("features", len(weights)),
            ),
            series=state.shares.series(
                f"share of the {params.nfeatures} largest importances", limit=params.threshold
            ),
            followed=len(largest) - 1,
            also=tuple(name for name, _ in largest[1:33]),
        )
