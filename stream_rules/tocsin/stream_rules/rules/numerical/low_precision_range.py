"""`low_precision_range`: gradients in 16 or 8 bits are near the limits of their type.

The training process sends, for each gradient in float16, bfloat16 or float8, the share of its
values that are not zero but below the smallest normal number of the type (`underflow`: digits are
lost, and what is a little smaller is zero; 6.1e-5 in float16, 1.2e-38 in bfloat16), and of those
above 0.9 of the largest (`overflow`: 65,504 in float16). Gradients of float32 weights are not
checked, whatever type autocast uses. There are two conditions, each a separate episode. Each must
be true in `for_summaries` consecutive summaries without recovering (the last value is at least nine
tenths of the first one):

- underflow: over all gradients together, weighted by their size, more than `underflow` of the
  numbers;
- overflow: of any one gradient, more than `overflow` of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Series, Subject
from tocsin.schemas.text import share_text
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors

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
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    frames: LowestRankRows = field(default_factory=LowestRankRows)
    sides: dict[str, _Side] = field(default_factory=dict)


class LowPrecisionRange(Rule[LowPrecisionRangeParams, _State]):
    """A warning for each end of the range."""

    meta = RuleMeta(
        name="low_precision_range",
        version=1,
        family="numerical",
        meaning="Gradients in 16 or 8 bits are too small, or too large, for their type.",
        severity="warning",
        comes="maybe",
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
    by_part = True

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        # The table of statistics comes in a frame of its own.
        if "underflow" not in frame.columns and "overflow" not in frame.columns:
            return
        whole = self.state.frames.assemble(frame)
        if whole is None or not len(whole.rows):
            return
        numel, params = whole.count("numel"), self.params
        size = np.ones(len(whole.rows)) if numel is None else numel.astype(np.float64)
        low, high = whole.column("underflow"), whole.column("overflow")
        if low is not None:
            known = np.nan_to_num(low.astype(np.float64))
            total = 100 * float((known * size).sum() / max(1.0, size.sum()))
            yield from self._side("underflow", total, params.underflow, known * size, whole, at)
        if high is not None:
            each = 100 * np.nan_to_num(high.astype(np.float64))
            yield from self._side("overflow", float(each.max()), params.overflow, each, whole, at)

    def _side(
        self,
        name: str,
        share: float,
        limit: float,
        weights: Doubles,
        frame: TensorFrame,
        at: Moment,
    ) -> Outcomes:
        side = self.state.sides.setdefault(name, _Side())
        side.steps = [*side.steps, frame.step][-SERIES_POINTS:]
        side.values = [*side.values, share][-SERIES_POINTS:]
        if share <= limit:
            side.row = []
            yield Clear(frame.step, about=name)
            return
        if not side.row:
            side.since, side.since_ms = frame.step, at.now_ms
        side.row = [*side.row, share][-self.params.for_summaries :]
        if len(side.row) == self.params.for_summaries and share >= _BACK * side.row[0]:
            yield self._finding(name, side, share, limit, weights, frame)

    def _finding(
        self,
        name: str,
        side: _Side,
        share: float,
        limit: float,
        weights: Doubles,
        frame: TensorFrame,
    ) -> Finding:
        order = np.argsort(-weights, kind="stable")
        worst = frame.rows[int(order[0])]
        affected = int((weights > 0).sum())
        what = (
            f"{share:.0f} % of the gradients are below the smallest normal number of their type, "
            f"most of them in {worst},"
            if name == "underflow"
            else f"{share_text(share)} % of the gradients of {worst} are near the largest number "
            "of their type"
        )
        return Finding(
            about=name,
            branch=name,
            subject=Subject(kind="tensor", name=worst, collection="gradients"),
            reason=f"{what} since step {side.since}",
            first_step=side.since,
            first_rank=self.state.frames.rank,
            onset_ms=side.since_ms,
            evidence=Evidence(
                facts=(fact(name, share, limit=limit, unit="percent"),),
                series=Series(
                    name=name,
                    unit="percent",
                    steps=tuple(side.steps),
                    values=tuple(side.values),
                    limit=limit,
                ),
                followed=max(0, affected - 1),
                also=named(frame.rows, order[1:affected].tolist()),
            ),
        )
