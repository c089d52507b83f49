"""`vanishing_gradient`: gradients that are too small to change anything.

It has two forms, each a separate episode, both over `for_steps` consecutive summaries of the
gradients:

- share: at least `share` of the tensors have a mean absolute gradient below `threshold`. A solved
  task has small gradients too, so this form pauses while the loss is below `solved` of the first
  one. The absolute size of a gradient does not matter to an optimizer that divides by it, like
  Adam, so the form also pauses while a step changes the median tensor by more than `moving` of its
  norm. (A loss in small units, 1e-5 of the usual ones, had all gradients below 1e-7 and moved by
  8e-3; where gradients had vanished it was 1e-7 and less.)
- depth: the first quarter of the layers has gradients less than `depth_ratio` times as large as the
  last quarter has (medians over tensors of the mean absolute gradient; from eight tensors on).

The preset `sagemaker` has SageMaker Debugger's documented condition: any tensor, in any summary,
whatever the loss, without the form `depth`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.tensor_rows import Doubles, mean_abs
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.streaks import Streak

_SMOOTH: Final = 0.1
_MIN_TENSORS: Final = 8


class VanishingGradientParams(Params):
    """Parameters of `vanishing_gradient`."""

    threshold: float = Field(default=1e-7, gt=0)
    """Mean absolute gradient below which a tensor's gradient counts as vanished."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of the tensors whose gradients must have vanished. Unit: share, 1 is all."""
    for_steps: int = Field(default=5, ge=1)
    """How many consecutive summaries. Unit: summaries."""
    depth_ratio: float = Field(default=1e-5, ge=0, lt=1)
    """Ratio of the gradients of the first layers to those of the last ones; 0 switches this form
    off."""
    solved: float = Field(default=0.01, ge=0, lt=1)
    """Loss relative to the first one, below which a task is solved; 0: off. Unit: share."""

    moving: float = Field(default=1e-4, gt=0)
    """The form `share` pauses while a step changes weights by more than this. Unit: share of their
    norm."""


@dataclass(slots=True)
class _Form:
    streak: Streak = field(default_factory=Streak)
    values: PointHistory = field(default_factory=PointHistory)


@dataclass(slots=True)
class _State(RowState):
    moves: float = 0.0
    forms: dict[str, _Form] = field(default_factory=dict)
    rank: int | None = None
    first_loss: float | None = None
    loss: float = 0.0


class VanishingGradient(TensorRowRule[VanishingGradientParams, _State]):
    """A warning: the run may still learn with only its last layers."""

    meta = RuleMeta(
        name="vanishing_gradient",
        version=2,
        family="numerical",
        meaning="The gradients of many tensors, or of the first layers, are almost zero.",
        severity="warning",
        available="maybe",
        inputs=(
            tensors("gradients"),
            tensors("updates", optional=True),
            scalar("loss", optional=True),
        ),
        capture_hint="gradients are captured when an optimizer of PyTorch steps",
        remedy="Check for saturated activations and check the initialisation of the first layers. "
        "Residual connections, normalisation, or ReLU instead of sigmoid and tanh help.",
        alias="VanishingGradient",
        params=VanishingGradientParams,
        branches={
            "share": "The gradients of many tensors are almost zero.",
            "depth": "The gradients of the first layers are tiny compared with those of the last "
            "ones.",
        },
        presets={
            "sagemaker": {
                "threshold": 1e-7,
                "share": 1e-9,
                "for_steps": 1,
                "depth_ratio": 0.0,
                "solved": 0.0,
                "moving": 1e30,
            }
        },
        does_not_see="Gradients that vanish inside a module without its own parameters, and a "
        "single tensor with vanishing gradients among many without: `no_gradient` covers tensors "
        "that get none at all.",
        resolve_after_steps=20,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state, losses = self.state, frame.column("loss")
        if losses is None or (state.rank is not None and frame.origin.rank > state.rank):
            return ()
        state.rank = frame.origin.rank
        for loss in losses.tolist():
            if not math.isfinite(loss):
                continue
            if state.first_loss is None:
                state.first_loss = state.loss = loss
            state.loss += _SMOOTH * (loss - state.loss)
        return ()

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        if table.collection == "updates":
            self._add_updates(table)
            return
        size = mean_abs(table)
        if size is None or not np.isfinite(size).any():
            return
        vanished = size < self.params.threshold
        share = float(vanished.sum() / np.isfinite(size).sum())
        rests = self._solved() or self.state.moves > self.params.moving
        form = self._form("share", table, share, at, holds=share >= self.params.share and not rests)
        if form is None:
            yield Clear(table.step, about="share")
        elif form.streak.length >= self.params.for_steps:
            yield self._share(table, size, form)
        ratio = _depth(size[np.isfinite(size)])
        if ratio is None:
            return
        form = self._form("depth", table, ratio, at, holds=ratio < self.params.depth_ratio)
        if form is None:
            yield Clear(table.step, about="depth")
        elif form.streak.length >= self.params.for_steps:
            yield self._ratio(table, form)

    def _add_updates(self, table: TensorFrame) -> None:
        """By how much a step changes the median tensor."""
        change, size = table.column("update_l2"), table.column("l2")
        if change is None or size is None:
            return
        with np.errstate(all="ignore"):
            ratio = change.astype(np.float64) / size
        known = ratio[np.isfinite(ratio)]
        self.state.moves = float(np.median(known)) if len(known) else 0.0

    def _solved(self) -> bool:
        first = self.state.first_loss
        return first is not None and abs(self.state.loss) < self.params.solved * abs(first)

    def _form(
        self, name: str, table: TensorFrame, value: float, at: Moment, *, holds: bool
    ) -> _Form | None:
        """One of the two, with this value; None: its condition does not hold."""
        form = self.state.forms.setdefault(name, _Form())
        form.values.append(table.step, value)
        return form if form.streak.update(table.step, at.now_ms, holds=holds) else None

    def _share(self, table: TensorFrame, size: Doubles, form: _Form) -> Finding:
        # Backward order: the last row belongs to the first layer, where vanishing is worst.
        bad = np.flatnonzero(size < self.params.threshold)[::-1].tolist()
        return self.row_finding(
            table,
            bad,
            branch="share",
            reason=f"{len(bad)} of {len(table.rows)} tensors have a mean absolute gradient below "
            f"{self.params.threshold:.3g} since step {form.streak.first_step}: "
            f"{table.rows[bad[0]]} has {size[bad[0]]:.3g}",
            first_step=form.streak.first_step,
            onset_ms=form.streak.first_ms,
            facts=(
                fact("share", form.values.values[-1], limit=self.params.share),
                fact("mean_abs", size[bad[0]], limit=self.params.threshold),
                fact("summaries", form.streak.length),
            ),
            series=form.values.series("share of vanished gradients", limit=self.params.share),
        )

    def _ratio(self, table: TensorFrame, form: _Form) -> Finding:
        ratio, limit = form.values.values[-1], self.params.depth_ratio
        return self.row_finding(
            table,
            [len(table.rows) - 1],
            kind="layer",
            branch="depth",
            reason=f"the gradients of the first layers are {ratio:.3g} of those of the last layers "
            f"since step {form.streak.first_step}",
            first_step=form.streak.first_step,
            onset_ms=form.streak.first_ms,
            facts=(
                fact("depth_ratio", ratio, limit=limit),
                fact("summaries", form.streak.length),
            ),
            series=form.values.series("first layers against last", limit=limit),
            explanation="medians of the mean absolute gradient over the first and the last "
            "quarter of the tensors",
        )


def _depth(size: Doubles) -> float | None:
    """First quarter against last quarter, from rows in backward order."""
    if len(size) < _MIN_TENSORS:
        return None
    quarter = len(size) // 4
    last, first = float(np.median(size[:quarter])), float(np.median(size[-quarter:]))
    return first / last if last > 0 else None
