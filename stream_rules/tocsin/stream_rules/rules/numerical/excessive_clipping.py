"""`excessive_clipping`: clipping removes nearly all of each step's gradient.

With `clip_grad_norm_`, the norm is known before and after clipping. The issue fires when, for
`for_steps` consecutive steps,

    after < `ratio` · before    and    after < `floor`

By default this means that less than one percent is left, and that the limit is too small to be
meant against spikes: published trainings use limits of 0.1 to 10, usually 1.0. If the limit is
usual and the gradients are more than 1 / `extreme` times as large, the branch `far_too_large` is an
info: an optimizer like Adam, which ignores the gradient's scale, may keep learning (a common reason
is a loss that is a sum instead of a mean).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar
from tocsin.stream_rules.signals.streaks import Streak

BEFORE: Final = "gradient_norm"
AFTER: Final = "gradient_norm_clipped"


class ExcessiveClippingParams(Params):
    """Parameters of `excessive_clipping`."""

    ratio: float = Field(default=0.01, gt=0, lt=1)
    """Share of the norm that is left after clipping. Unit: share."""
    floor: float = Field(default=0.02, gt=0)
    """Norm after clipping below which it is a fault with any optimizer."""
    extreme: float = Field(default=1e-4, gt=0, lt=1)
    """Share of the norm that is left, for the info. Unit: share."""
    for_steps: int = Field(default=5, ge=1)
    """How many steps in a row. Unit: steps."""
    extreme_steps: int = Field(default=50, ge=1)
    """How many steps in a row for the info. Unit: steps."""


@dataclass(slots=True)
class _State:
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    little: Streak = field(default_factory=Streak)
    extreme: Streak = field(default_factory=Streak)


class ExcessiveClipping(Rule[ExcessiveClippingParams, _State]):
    """One episode for each branch."""

    meta = RuleMeta(
        name="excessive_clipping",
        version=1,
        family="numerical",
        meaning="Clipping removes almost all of the gradients.",
        severity="warning",
        available="maybe",
        inputs=(scalar(AFTER), scalar(BEFORE, optional=True)),
        capture_hint="norms before and after are seen with torch.nn.utils.clip_grad_norm_, which "
        "frameworks also use",
        remedy="Raise the limit of clip_grad_norm_ to the usual size of the gradient norm (1.0 is "
        "common), and make the loss a mean, not a sum.",
        does_not_see="Clipping by value, by hand, or by a norm other than the L2 norm.",
        params=ExcessiveClippingParams,
        branches={
            "nothing_left": "Clipping removes almost all of each gradient.",
            "far_too_large": "The limit is usual, but the gradients are far above it. An info.",
        },
        resolve_after_steps=20,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        before, after = frame.column(BEFORE), frame.column(AFTER)
        if before is None or after is None:
            return
        if state.rank_series.overtaken_by(frame):
            self.state = state = _State(rank_series=state.rank_series)
        if not state.rank_series.accepts(frame):
            return
        rows = zip(frame.steps.tolist(), before.tolist(), after.tolist(), strict=True)
        for step, whole, left in rows:
            if not (math.isfinite(whole) and math.isfinite(left)):
                continue
            share = left / whole if whole > 0 else 1.0
            if state.rank_series.add(step, share):
                yield from self._step(step, whole, left, share, at)

    def _step(self, step: int, whole: float, left: float, share: float, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        little = share < params.ratio and left < params.floor
        extreme = share < params.extreme and not little
        for branch, holds, streak, least in (
            ("nothing_left", little, state.little, params.for_steps),
            ("far_too_large", extreme, state.extreme, params.extreme_steps),
        ):
            if not streak.update(step, at.now_ms, holds=holds):
                yield Clear(step, about=branch)
            elif streak.length >= least:
                yield self._finding(branch, streak, whole, left)

    def _finding(self, branch: str, streak: Streak, whole: float, left: float) -> Finding:
        limit = self.params.ratio if branch == "nothing_left" else self.params.extreme
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="scalar", name=BEFORE),
            reason=f"clipping leaves {left:.3g} of a gradient norm of {whole:.3g}, at each step "
            f"since step {streak.first_step}",
            first_step=streak.first_step,
            first_rank=self.state.rank_series.rank,
            severity=None if branch == "nothing_left" else "info",
            facts=(
                fact("norm_before", whole),
                fact("norm_after", left),
                fact("share_left", left / whole, limit=limit),
                fact("for", streak.length, unit="steps"),
            ),
            series=self.state.rank_series.series("share of the norm that is left", limit=limit),
        )
