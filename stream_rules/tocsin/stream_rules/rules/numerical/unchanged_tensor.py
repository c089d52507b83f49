"""`unchanged_tensor`: a weight that gets gradients but does not change.

A tensor is unchanged when all statistics of its last `num_steps` summaries are equal within rtol ·
abs(value) + atol, and the measured change within a step, if there is one, is as small. Only weights
that their gradient could move are checked. Frozen parameters have no gradient. A gradient below
1e-4 of the usual gradient (the upper quartile over the tensors, now or in the first summaries) is
rounding noise, as for a bias before a normalisation or a solved task; so is a bias gradient below
1e-2 of the gradient of its layer's weight, which in 16 bits is that noisy.

Parameters that have gradients but are in no optimizer do not change either: the branch
`in_no_optimizer` reports them after the first seven steps;
`stream_rules/signals/parameters_without_optimizer.py` defines when that is a warning.

While the learning rates of all parameter groups are zero, or below 1e-4 of their highest, the rule
pauses: `learning_rate_anomaly` reports that. If only some are, as many tensors as their groups have
may stay unchanged, which is a usual way to freeze a part of a model.

The tolerances match float32 arithmetic. SageMaker Debugger's are ten thousand times wider: with a
learning rate of 1e-6, ten steps change a LayerNorm's statistics by less than 1e-5 of their size,
and that run learns. The preset `sagemaker` has its tolerances and checks every weight, frozen or
not, so you name the tensors to check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Series
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import (
    LowestRankRows,
    MarkedRows,
    aligned,
    places,
    rows_asked_for,
)
from tocsin.stream_rules.rule import Params, RuleMeta, event, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.frozen_groups import FrozenGroups
from tocsin.stream_rules.signals.parameters_without_optimizer import (
    COLLECTION,
    ParametersWithoutOptimizer,
)
from tocsin.stream_rules.signals.significant_gradients import SignificantGradients

_MAX_COLLECTIONS: Final = 256
"""Collections, and arrays that are recorded one by one, that are watched at most."""
_POINTS: Final = 32


class UnchangedTensorParams(Params):
    """Parameters of `unchanged_tensor`."""

    num_steps: int = Field(default=3, ge=2)
    """How many consecutive summaries must be equal. Unit: summaries."""
    rtol: float = Field(default=1e-7, ge=0, lt=1)
    """Relative tolerance of two values. Unit: share of the value."""
    atol: float = Field(default=1e-12, ge=0)
    """Absolute tolerance of two values."""
    only_pushed: bool = True
    """Whether to ignore weights that their gradients could not move, or whose learning rate is
    paused."""
    tensors: tuple[str, ...] = Field(default=(), strict=False)
    """Further tensors to watch, as COLLECTION/NAME; `*` and `?` stand for any characters."""


@dataclass(slots=True)
class _Kept:
    rows: tuple[str, ...] = ()
    values: StateArray = field(default_factory=lambda: np.zeros((0, 0)))
    columns: list[str] = field(default_factory=list)
    equal: StateArray = field(default_factory=lambda: np.zeros(0))
    norms: StateArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    steps: list[int] = field(default_factory=list)
    first_step: int | None = None


@dataclass(slots=True)
class _State(RowState):
    collections: dict[str, _Kept] = field(default_factory=dict)
    pushed: SignificantGradients = field(default_factory=SignificantGradients)
    updates: LowestRankRows = field(default_factory=LowestRankRows)
    changed: MarkedRows = field(default_factory=MarkedRows)
    groups: FrozenGroups = field(default_factory=FrozenGroups)
    unowned: ParametersWithoutOptimizer = field(default_factory=ParametersWithoutOptimizer)


class UnchangedTensor(TensorRowRule[UnchangedTensorParams, _State]):
    """One episode for each collection; it names the first tensor and how many others. Arrays that
    are recorded one by one each have their own."""

    meta = RuleMeta(
        name="unchanged_tensor",
        version=3,
        family="numerical",
        meaning="A weight gets gradients but does not change.",
        severity="warning",
        available="maybe",
        inputs=(
            tensors("weights"),
            tensors("gradients", optional=True),
            tensors("updates", optional=True),
            tensors("not_optimized", optional=True),
            tensors("*", optional=True),
            scalar("lr.*", optional=True),
            event(RunStarted, optional=True),
        ),
        capture_hint="weights are captured when an optimizer of PyTorch steps",
        remedy="Check that the optimizer has this parameter and not a copy of it, that its group's "
        "learning rate is not tiny, and that bfloat16 weights can represent the update.",
        alias="UnchangedTensor",
        params=UnchangedTensorParams,
        presets={
            "sagemaker": {"num_steps": 3, "rtol": 1e-5, "atol": 1e-8, "only_pushed": False},
        },
        does_not_see="Single weights of a tensor that otherwise changes: the rule compares whole "
        "tensors. Weights that no gradient reaches do not count: `no_gradient` covers them.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        self.state.groups.add_start(data)
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        self.state.groups.add_rates(frame)
        return ()

    def reads(self, frame: TensorFrame) -> bool:
        own = frame.collection in ("weights", "gradients", "updates", COLLECTION)
        return own or bool(self._selected(frame).any())

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state = self.state
        if frame.collection == COLLECTION:
            yield from state.unowned.inspect(frame)
            return
        if frame.collection == "gradients":
            state.pushed.add(frame)
        elif frame.collection == "updates":
            whole = state.updates.assemble(frame)
            change = None if whole is None else whole.column("update_l2")
            size = None if whole is None else whole.column("l2")
            if whole is not None and change is not None and size is not None:
                limit = self.params.atol + self.params.rtol * size
                state.changed = MarkedRows(whole.rows, change > limit)
        if frame.collection == "weights" or self._selected(frame).any():
            key = self.table_key(frame)
            if key in state.collections or len(state.collections) < _MAX_COLLECTIONS:
                state.collections.setdefault(key, _Kept())
                yield from super().on_tensors(frame, at)

    def table_key(self, frame: TensorFrame) -> str:
        # Each call of `run.record` sends a frame of one row, several of them at one step.
        alone = frame.parts == 1 and len(frame.rows) == 1
        return f"{frame.collection}/{frame.rows[0]}" if alone else frame.collection

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, about = self.state, self.table_key(table)
        kept = state.collections[about]
        resting = 0
        if table.collection == "weights" and self.params.only_pushed:
            rest = state.groups.inspect()
            if rest.everywhere:
                return
            resting = rest.tensors
        self._keep(kept, table)
        unchanged = np.flatnonzero(kept.equal >= self.params.num_steps - 1)
        if len(unchanged) <= resting:
            kept.first_step = None
            yield Clear(about=about)
            return
        if kept.first_step is None:
            kept.first_step = kept.steps[max(0, len(kept.steps) - self.params.num_steps)]
        yield self._finding(table, kept, unchanged.tolist(), about, resting)

    def _keep(self, kept: _Kept, whole: TensorFrame) -> None:
        equal = self._equal(kept, whole)
        equal[~self._watched(whole)] = 0
        points = min(self.params.num_steps, _POINTS)
        size = whole.column("l2")
        norms = np.full((len(whole.rows), 0 if size is None else points), np.nan, np.float32)
        if size is not None:
            norms[:, -1] = size
            if kept.norms.shape == (len(kept.rows), points):
                before = (column.astype(np.float64) for column in kept.norms.T[1:])
                for i, column in enumerate(before):
                    norms[:, i] = aligned(whole.rows, kept.rows, column)
        kept.rows, kept.columns, kept.norms = whole.rows, list(whole.columns), norms
        kept.values, kept.equal = whole.values.astype(np.float64), equal
        kept.steps = [*kept.steps, whole.step][-self.params.num_steps - 8 :]

    def _equal(self, kept: _Kept, frame: TensorFrame) -> npt.NDArray[np.float64]:
        """For each row, how many summaries in a row have been equal to the one before."""
        if kept.columns != list(frame.columns):
            return np.zeros(len(frame.rows))
        params, values = self.params, frame.values.astype(np.float64)
        old, run = kept.values, kept.equal
        if frame.rows != kept.rows:
            if not kept.rows:
                return np.zeros(len(frame.rows))
            index = places(frame.rows, kept.rows)
            new = index < 0
            old, run = old[index], run[index]
            old[new] = np.nan
        with np.errstate(invalid="ignore"):
            near = np.abs(values - old) <= params.atol + params.rtol * np.abs(old)
        return np.where(near.all(axis=1), run + 1, 0)

    def _watched(self, frame: TensorFrame) -> npt.NDArray[np.bool_]:
        """Which rows could have changed."""
        if frame.collection != "weights":
            return self._selected(frame)
        still = ~self.state.changed.among(frame.rows)
        return still & self.state.pushed.among(frame.rows) if self.params.only_pushed else still

    def _selected(self, frame: TensorFrame) -> npt.NDArray[np.bool_]:
        """Which rows the parameter names."""
        if not self.params.tensors:
            return np.zeros(len(frame.rows), bool)
        return rows_asked_for(frame, self.params.tensors)

    def _finding(
        self, table: TensorFrame, kept: _Kept, unchanged: list[int], about: str, resting: int
    ) -> Finding:
        first, most = table.rows[unchanged[0]], self.params.num_steps
        norms = kept.norms[unchanged[0]]
        seen = np.flatnonzero(np.isfinite(norms))
        steps = kept.steps[-len(norms) :]
        has = "gets gradients and " if table.collection == "weights" else ""
        at_rest = [fact("at_rest", resting, unit="tensors")] if resting else []
        return self.row_finding(
            table,
            unchanged,
            about=about,
            reason=f"{first} {has}has not changed since step {kept.first_step}",
            others=", nor do {} others",
            first_step=kept.first_step,
            facts=(
                fact("equal_summaries", kept.equal[unchanged[0]] + 1, limit=most),
                fact("unchanged", len(unchanged), unit="tensors"),
                fact("watched", len(table.rows), unit="tensors"),
                *at_rest,
            ),
            series=Series(
                name=f"norm of {first}"[:200],
                steps=tuple(steps[i - len(norms) + len(steps)] for i in seen),
                values=tuple(float(norms[i]) for i in seen),
            )
            if len(seen)
            else None,
            explanation="all statistics of the summaries are equal; parameters without a "
            "gradient, or with one that is rounding noise, are not counted",
        )
