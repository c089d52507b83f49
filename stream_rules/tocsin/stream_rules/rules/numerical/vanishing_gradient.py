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

The preset `sagemaker` is the condition that SageMaker Debugger documents: any tensor, in any
summary, whatever the loss, and no form by depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Evidence, Fact, Series, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows, mean_abs, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar, tensors

_SMOOTH: Final = 0.1
_LEAST: Final = 8


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
    row: int = 0
    first_step: int = 0
    first_ms: int = 0
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    frames: LowestRankRows = field(default_factory=LowestRankRows)
    updates: LowestRankRows = field(default_factory=LowestRankRows)
    moves: float = 0.0
    forms: dict[str, _Form] = field(default_factory=dict)
    rank: int | None = None
    first_loss: float | None = None
    loss: float = 0.0


class VanishingGradient(Rule[VanishingGradientParams, _State]):
    """A warning: the run may still learn with only its last layers."""

    meta = RuleMeta(
        name="vanishing_gradient",
        version=2,
        family="numerical",
        meaning="The gradients of many tensors, or of the first layers, are almost zero.",
        severity="warning",
        comes="maybe",
        inputs=(
            tensors("gradients"),
            tensors("updates", beside=True),
            scalar("loss", beside=True),
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
        does_not_see="Gradients that vanish inside a module without parameters of its own, and a "
        "single tensor with vanishing gradients among many without: `no_gradient` covers tensors "
        "that get none at all.",
        resolve_after_steps=20,
    )
    state_type = _State
    by_part = True

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state, losses = self.state, frame.column("loss")
        if losses is None or (state.rank is not None and frame.speaker.rank > state.rank):
            return ()
        state.rank = frame.speaker.rank
        for loss in losses.tolist():
            if not math.isfinite(loss):
                continue
            if state.first_loss is None:
                state.first_loss = state.loss = loss
            state.loss += _SMOOTH * (loss - state.loss)
        return ()

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if frame.collection == "updates":
            self._add_updates(frame)
            return
        whole = self.state.frames.assemble(frame)
        size = None if whole is None else mean_abs(whole)
        if whole is None or size is None or not np.isfinite(size).any():
            return
        vanished = size < self.params.threshold
        share = float(vanished.sum() / np.isfinite(size).sum())
        rests = self._solved() or self.state.moves > self.params.moving
        yield from self._evaluate(
            whole, at, "share", share, holds=share >= self.params.share and not rests
        )
        ratio = _depth(size[np.isfinite(size)])
        if ratio is not None:
            yield from self._evaluate(
                whole, at, "depth", ratio, holds=ratio < self.params.depth_ratio
            )

    def _add_updates(self, frame: TensorFrame) -> None:
        """By how much a step changes the median tensor."""
        whole = self.state.updates.assemble(frame)
        change = None if whole is None else whole.column("update_l2")
        size = None if whole is None else whole.column("l2")
        if change is None or size is None:
            return
        with np.errstate(all="ignore"):
            ratio = change.astype(np.float64) / size
        known = ratio[np.isfinite(ratio)]
        self.state.moves = float(np.median(known)) if len(known) else 0.0

    def _solved(self) -> bool:
        first = self.state.first_loss
        return first is not None and abs(self.state.loss) < self.params.solved * abs(first)

    def _evaluate(
        self, frame: TensorFrame, at: Moment, name: str, value: float, *, holds: bool
    ) -> Outcomes:
        form = self.state.forms.setdefault(name, _Form())
        form.steps = [*form.steps, frame.step][-SERIES_POINTS:]
        form.values = [*form.values, value][-SERIES_POINTS:]
        if not holds:
            form.row = 0
            yield Clear(frame.step, about=name)
            return
        if form.row == 0:
            form.first_step, form.first_ms = frame.step, at.now_ms
        form.row += 1
        if form.row >= self.params.for_steps:
            yield self._share(frame, form) if name == "share" else self._ratio(frame, form)

    def _share(self, frame: TensorFrame, form: _Form) -> Finding:
        size = mean_abs(frame)
        assert size is not None
        # Backward order: the last row belongs to the first layer, where vanishing is worst.
        bad = np.flatnonzero(size < self.params.threshold)[::-1]
        return self._finding(
            "share",
            form,
            Subject(kind="tensor", name=frame.rows[bad[0]], collection="gradients"),
            f"{len(bad)} of {len(frame.rows)} tensors have a mean absolute gradient below "
            f"{self.params.threshold:.3g} since step {form.first_step}: {frame.rows[bad[0]]} has "
            f"{size[bad[0]]:.3g}",
            (
                fact("share", form.values[-1], limit=self.params.share),
                fact("mean_abs", size[bad[0]], limit=self.params.threshold),
            ),
            Evidence(
                followed=len(bad) - 1,
                also=named(frame.rows, bad[1:]),
                series=_series("share of vanished gradients", form, self.params.share),
            ),
        )

    def _ratio(self, frame: TensorFrame, form: _Form) -> Finding:
        ratio = form.values[-1]
        return self._finding(
            "depth",
            form,
            Subject(kind="layer", name=frame.rows[-1], collection="gradients"),
            f"the gradients of the first layers are {ratio:.3g} of those of the last layers since "
            f"step {form.first_step}",
            (fact("depth_ratio", ratio, limit=self.params.depth_ratio),),
            Evidence(
                series=_series("first layers against last", form, self.params.depth_ratio),
                explanation="medians of the mean absolute gradient over the first and the last "
                "quarter of the tensors",
            ),
        )

    def _finding(
        self,
        about: str,
        form: _Form,
        subject: Subject,
        reason: str,
        facts: tuple[Fact, ...],
        evidence: Evidence,
    ) -> Finding:
        facts = (*facts, fact("summaries", form.row))
        return Finding(
            about=about,
            branch=about,
            subject=subject,
            reason=reason,
            first_step=form.first_step,
            first_rank=self.state.frames.rank,
            onset_ms=form.first_ms,
            evidence=evidence.model_copy(update={"facts": facts}),
        )


def _depth(size: Doubles) -> float | None:
    """First quarter against last quarter, from rows in backward order."""
    if len(size) < _LEAST:
        return None
    quarter = len(size) // 4
    last, first = float(np.median(size[:quarter])), float(np.median(size[-quarter:]))
    return first / last if last > 0 else None


def _series(name: str, form: _Form, limit: float) -> Series:
    return Series(name=name, steps=tuple(form.steps), values=tuple(form.values), limit=limit)
