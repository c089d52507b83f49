"""`low_precision_range`: gradients in 16 or 8 bits are near the limits of their type.

The training process sends, for each gradient in float16, bfloat16 or float8, the share of its
values that are not zero but below the smallest normal number of the type (`underflow`: such values
lose digits, and slightly smaller ones become zero; 6.1e-5 in float16, 1.2e-38 in bfloat16), and the
share above 0.9 of the largest number (`overflow`: 65,504 in float16). Gradients of float32 weights
are not checked, whatever type autocast uses. There are two conditions, each a separate episode.
Each must be true in `for_summaries` consecutive summaries without recovering (the last value is at
least nine tenths of the first one):

- underflow: the underflow share over all gradients together, weighted by their size, is above
  `underflow`;
- overflow: the overflow share of any gradient is above `overflow`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.text import share_text
from tocsin.stream_rules.outcomes import Clear, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule

_BACK = 0.9


class LowPrecisionRangeParams(Params):
    """Parameters of `low_precision_range`."""

    underflow: float = Field(default=30.0, gt=0, lt=100)
    """Share of all gradients below the smallest normal number. Unit: percent."""
    overflow: float = Field(default=0.1, gt=0, lt=100)
    """Share of one gradient near the largest number. Unit: percent."""
    for_summaries: int = Field(default=3, ge=1)
    """How many summaries of the gradients in a row. Unit: summaries."""


@dataclass(slots=True)
class _Side:
    row: list[float] = field(default_factory=list)
    since: int = 0
    since_ms: int = 0
    shares: PointHistory = field(default_factory=PointHistory)


@dataclass(slots=True)
class _State(RowState):
    sides: dict[str, _Side] = field(default_factory=dict)


class LowPrecisionRange(TensorRowRule[LowPrecisionRangeParams, _State]):
    """A warning for each end of the range."""

    meta = RuleMeta(
        name="low_precision_range",
        version=1,
        family="numerical",
        meaning="Gradients in 16 or 8 bits are too small, or too large, for their type.",
        severity="warning",
        available="maybe",
        inputs=(tensors("gradients"),),
        capture_hint="gradients are captured when an optimizer of PyTorch steps",
        remedy="Keep the weights in float32 and compute in bfloat16 (torch.autocast), or scale the "
        "loss (torch.amp.GradScaler): up against underflow, down or with clipping against "
        "overflow.",
        does_not_see="Activations, and rounding inside autocast: gradients of float32 weights have "
        "the range of float32.",
        branches={
            "underflow": "Many gradients are below the smallest normal number of their type.",
            "overflow": "Some gradients are near the largest number of their type.",
        },
        params=LowPrecisionRangeParams,
        resolve_after_steps=20,
    )
    state_type = _State

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        # The table of statistics comes in a frame of its own.
        ours = "underflow" in frame.columns or "overflow" in frame.columns
        return super().on_tensors(frame, at) if ours else ()

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        numel, params = table.count("numel"), self.params
        size = np.ones(len(table.rows)) if numel is None else numel.astype(np.float64)
        low, high = table.column("underflow"), table.column("overflow")
        if low is not None:
            known = np.nan_to_num(low.astype(np.float64))
            total = 100 * float((known * size).sum() / max(1.0, size.sum()))
            yield from self._side("underflow", total, params.underflow, known * size, table, at)
        if high is not None:
            each = 100 * np.nan_to_num(high.astype(np.float64))
            yield from self._side("overflow", float(each.max()), params.overflow, each, table, at)

    def _side(
        self,
        name: str,
        share: float,
        limit: float,
        weights: Doubles,
        table: TensorFrame,
        at: Moment,
    ) -> Outcomes:
        side = self.state.sides.setdefault(name, _Side())
        side.shares.append(table.step, share)
        if share <= limit:
            side.row = []
            yield Clear(table.step, about=name)
            return
        if not side.row:
            side.since, side.since_ms = table.step, at.now_ms
        side.row = [*side.row, share][-self.params.for_summaries :]
        if len(side.row) < self.params.for_summaries or share < _BACK * side.row[0]:
            return
        order = np.argsort(-weights, kind="stable").tolist()
        worst = table.rows[order[0]]
        what = (
            f"{share:.0f} % of the gradients are below the smallest normal number of their type, "
            f"most of them in {worst},"
            if name == "underflow"
            else f"{share_text(share)} % of the gradients of {worst} are near the largest number "
            "of their type"
        )
        yield self.row_finding(
            table,
            order[: max(1, int((weights > 0).sum()))],
            branch=name,
            reason=f"{what} since step {side.since}",
            first_step=side.since,
            onset_ms=side.since_ms,
            facts=(fact(name, share, limit=limit, unit="percent"),),
            series=side.shares.series(name, unit="percent", limit=limit),
        )
