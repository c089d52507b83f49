"""`dead_optimizer_state`: the optimizer's state stays empty, or is discarded.

It has three forms, each a separate episode:

- `empty`: the momentum (`exp_avg`, `momentum_buffer`) of at least `share` of the tensors is
  entirely zero although their gradients are not.
- `underflow`: in at least `share` of the tensors, more than half of the values have a second moment
  (`exp_avg_sq`, `square_avg`) of zero where the first is not zero: float16 cannot hold the square
  of a gradient below 1e-4, nor float32 that of one below 1e-23. Such an update is then divided by
  epsilon alone.
- `renewed`: the optimizer is a different object at each of `for_steps` consecutive steps: the loop
  creates it again each time and so discards its state.

One summary with its gradients is enough to detect the first two. Neither occurred in any float32
training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.reading.tensor_rows import MarkedRows
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule

RENEWED: Final = "optimizer_renewed"
_FIRST: Final = ("exp_avg", "momentum_buffer")
_SECOND: Final = ("exp_avg_sq", "square_avg")
_MOSTLY: Final = 0.5
_TINY: Final = 1e-19
"""The square of a smaller gradient is no normal number of float32."""

Mask = npt.NDArray[np.bool_]


class DeadOptimizerStateParams(Params):
    """Parameters of `dead_optimizer_state`."""

    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the tensors with a gradient that must be affected. Unit: share."""
    for_steps: int = Field(default=3, ge=2)
    """Consecutive steps with a different optimizer object. Unit: steps."""


@dataclass(slots=True)
class _State(RowState):
    pushed: MarkedRows = field(default_factory=MarkedRows)
    rank_series: StoredRankSeries = field(default_factory=RankSeries)


@dataclass(frozen=True, slots=True)
class _Moments:
    """The rows `PARAMETER.KIND` of a table; `first_of` is the row of the same parameter's first
    moment, -1 where it has none."""

    parameters: tuple[str, ...]
    first: Mask
    second: Mask
    first_of: npt.NDArray[np.int64]


@lru_cache(maxsize=16)
def _moments(rows: tuple[str, ...]) -> _Moments:
    """The parsed names; kept, because the same table comes again."""
    parameters, kinds = zip(*((p, k) for p, _, k in (r.rpartition(".") for r in rows)), strict=True)
    at = {p: i for i, (p, k) in enumerate(zip(parameters, kinds, strict=True)) if k in _FIRST}
    return _Moments(
        parameters=parameters,
        first=np.array([kind in _FIRST for kind in kinds]),
        second=np.array([kind in _SECOND for kind in kinds]),
        first_of=np.array([at.get(parameter, -1) for parameter in parameters], np.int64),
    )


class DeadOptimizerState(TensorRowRule[DeadOptimizerStateParams, _State]):
    """One episode for each branch; it names the first tensor and how many others."""

    meta = RuleMeta(
        name="dead_optimizer_state",
        version=1,
        family="numerical",
        meaning="The optimizer's state is empty, or is thrown away at each step.",
        severity="warning",
        available="maybe",
        inputs=(
            tensors("optimizer_state"),
            scalar(RENEWED),
            tensors("gradients", optional=True),
        ),
        capture_hint="the collection optimizer_state is captured for optimizers that have a state, "
        "unless it is off",
        remedy="Create the optimizer once, before the loop, and restore its state when you resume "
        "a run; keep weights and moments in float32 if gradients are small.",
        does_not_see="States in 8 bits or in factored form, and an optimizer that is recreated "
        "only occasionally, such as once per epoch.",
        params=DeadOptimizerStateParams,
        branches={
            "empty": "The momentum of many tensors stays zero.",
            "underflow": "Their second moment is zero where the first is not.",
            "renewed": "The optimizer is recreated at each step.",
        },
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        rank_series = self.state.rank_series
        if not rank_series.accepts(frame):
            return
        for step, streak in rank_series.points(frame, RENEWED):
            if not (math.isfinite(streak) and streak >= self.params.for_steps):
                yield Clear(step, about="renewed")
                continue
            first = max(0, step - int(streak))
            yield Finding(
                about="renewed",
                branch="renewed",
                subject=Subject(kind="run", name="optimizer"),
                reason=f"the optimizer has been recreated at each step since step {first}, and "
                "loses its state",
                first_step=first,
                first_rank=rank_series.rank,
                facts=(fact("renewed", streak, limit=self.params.for_steps, unit="steps"),),
            )

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state = self.state
        if table.collection == "gradients":
            size = table.column("absmax")
            if size is not None:
                # Smaller ones have no square that is a number, and are noise.
                state.pushed = MarkedRows(table.rows, size > _TINY)
            return
        zeros, numel = table.count("zeros"), table.count("numel")
        if zeros is None or numel is None:
            return
        empty = zeros.astype(np.float64) / np.maximum(numel, 1)
        moments = _moments(table.rows)
        momenta = moments.first & state.pushed.among(moments.parameters)
        squares = moments.second & (moments.first_of >= 0)
        behind = empty - empty[moments.first_of]
        yield from self._evaluate("empty", table, momenta, (empty >= 1.0) & momenta)
        yield from self._evaluate("underflow", table, squares, (behind > _MOSTLY) & squares)

    def _evaluate(self, branch: str, table: TensorFrame, expected: Mask, bad: Mask) -> Outcomes:
        among, found = int(expected.sum()), np.flatnonzero(bad).tolist()
        if not among:
            return
        if len(found) < max(1.0, self.params.share * among):
            yield Clear(table.step, about=branch)
            return
        others = f" and {len(found) - 1} others" if len(found) > 1 else ""
        what = {
            "empty": "although their parameters have gradients",
            "underflow": "in most places where the first moment is not",
        }[branch]
        yield self.row_finding(
            table,
            found,
            branch=branch,
            reason=f"{table.rows[found[0]]}{others} are zero {what}",
            first_step=table.step,
            facts=(
                fact("tensors", len(found)),
                fact("watched", among, unit="tensors"),
            ),
        )
