"""`exploding_gradient`: the gradient norm is far above its own history.

With n the global gradient norm of a step, as it was before `clip_grad_norm_`, and E its exponential
moving average, the condition is n > factor · E for `for_steps` steps in a row, or n > factor² · E
at once, after `warmup_steps`. Outliers (n > factor · E) are not included in E. The norm must also
be twice the largest recent one: on a memorised data set norms are near zero, and an ordinary batch
is an outlier. If clipping removes more than half of the norm, the rule requires n > factor² · E or
a rising loss: clipping handles single bursts, as in recurrent networks. If gradients are sharded
over the ranks, n is combined from all shards.

At steps whose exact norm was not read, an estimate from a sample of the gradients replaces it. The
estimate is included in E unless it is an outlier. It has no other effect: it never fires, does not
count for the largest norm, and does not end a series of outliers, since the sample may miss large
values. Only steps with an exact norm count as consecutive. If the last of them was not an outlier,
an estimate counts as a healthy step, too.

It is critical only if the loss rises too and stays high: the median of the 50 losses from the first
outlier on, and that of the newest ten of them, are more than twice what the loss was before. Until
that is known the issue stays open. In the first spike of BLOOM's training, and in a training whose
task is switched, the loss rises and recovers within 50 steps: both are healthy. If the loss is
still high after 500 losses without an outlier, this is its new level, and later outliers are
compared with it: the issue resolves, since the norm is normal again, and `loss_diverged` covers the
loss.

The factor is far above healthy runs (a small GPT and a ResNet stay below 5) and well below the
first spike of BLOOM's training, when its loss still looked normal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.reading.sharded_norms import ShardedNorms
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar

_TAMED: Final = 0.5
"""What is left of a norm that was clipped in earnest."""

_STAYS: Final = 50
_NEWEST: Final = 10
"""Losses that show whether a loss that has followed stays up: so many, and the newest of them."""

_LEVEL: Final = 500
"""Losses without an outlier after which a loss that stays up has a new level."""


class ExplodingGradientParams(Params):
    """Parameters of `exploding_gradient`."""

    factor: float = Field(default=20.0, gt=1)
    """Ratio of the norm to its moving average above which a step is an outlier."""
    ema_steps: int = Field(default=100, ge=2)
    """Length of the moving average. Unit: steps."""
    for_steps: int = Field(default=2, ge=1)
    """Consecutive outliers needed below factor². Unit: steps."""
    warmup_steps: int = Field(default=20, ge=1)
    """First steps, which only set the moving average. Unit: steps."""


@dataclass(slots=True)
class _State:
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    seen: int = 0
    average: float = 0.0
    peak: float = 0.0
    row: int = 0
    first_step: int = -1
    first_ms: int = 0
    loss: float | None = None
    loss_before: float | None = None
    found: bool = False
    """Whether an issue is open; its norm, and the losses since its first step."""
    norm: float = 0.0
    after: list[float] = field(default_factory=list)
    calm: int = 0
    """How many of these losses have come since the last outlier, and the first of their steps."""
    calm_since: int = 0
    parts: ShardedNorms = field(default_factory=ShardedNorms)


class ExplodingGradient(Rule[ExplodingGradientParams, _State]):
    """Warns of the norm itself; critical once the loss has followed for 50 steps. Never requests a
    stop."""

    meta = RuleMeta(
        name="exploding_gradient",
        version=2,
        family="numerical",
        meaning="The global gradient norm is many times its own moving average.",
        severity="warning",
        inputs=(
            scalar("gradient_norm"),
            scalar("gradient_norm_sampled"),
            scalar("gradient_norm_local_part"),
        ),
        capture_hint="the gradient norm is captured when an optimizer of PyTorch steps",
        remedy="Clip the gradient norm, lower the learning rate or lengthen its warm-up; if one "
        "batch caused it, inspect that batch.",
        alias=None,
        params=ExplodingGradientParams,
        does_not_see="A norm that is too large from the first step on, and one that grows slowly "
        "enough for its moving average to follow; `loss_diverged` reports the result.",
        resolve_after_steps=20,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        if state.rank_series.overtaken_by(frame):
            self.state = state = _State(rank_series=state.rank_series, parts=state.parts)
        whole = list(state.parts.complete(frame, at.run.world_size))
        if not state.rank_series.accepts(frame):
            yield from self._put_together(whole, at)
            return
        losses, left = deque(_points(frame, "loss")), dict(_points(frame, "gradient_norm_clipped"))
        for step, norm in state.rank_series.points(frame, "gradient_norm"):
            while losses and losses[0][0] <= step:
                yield from self._follow(*losses.popleft())
            if math.isfinite(norm):
                tamed = left.get(step, norm) < _TAMED * norm
                yield from self._point(step, norm, at, tamed=tamed)
        for step, norm in _points(frame, "gradient_norm_sampled"):
            # An estimate fires nothing: where it jumps, the exact norm is read in its place.
            warm = state.seen >= self.params.warmup_steps
            if math.isfinite(norm) and not (warm and norm > self.params.factor * state.average):
                self._learn(norm)
                if state.row == 0:
                    yield self._healthy(step)
        for step, loss in losses:
            yield from self._follow(step, loss)
        yield from self._put_together(whole, at)

    def _put_together(self, whole: Iterable[tuple[int, float]], at: Moment) -> Outcomes:
        for step, norm in whole:
            if self.state.rank_series.add(step, norm) and math.isfinite(norm):
                yield from self._point(step, norm, at, tamed=False)

    def _point(self, step: int, norm: float, at: Moment, *, tamed: bool) -> Outcomes:
        state, params = self.state, self.params
        warm = state.seen >= params.warmup_steps
        over = norm > params.factor * state.average > 0
        outlier = warm and over and norm > 2 * state.peak
        if not outlier:
            self._learn(norm)
            state.peak = max(norm, state.peak * (1 - 1 / (5 * params.ema_steps)))
            state.row = 0
            yield self._healthy(step)
            return
        if state.row == 0:
            state.first_step, state.first_ms = step, at.now_ms
        state.row += 1
        state.calm = 0
        follows = self._loss_follows()
        lasts = state.row >= params.for_steps and (follows or not tamed)
        if lasts or norm > params.factor**2 * state.average:
            if not state.found:
                state.found, state.after = True, []
            state.norm = norm
            yield self._finding(norm, follows=follows)

    def _learn(self, norm: float) -> None:
        state = self.state
        state.seen += 1
        weight = max(2 / (self.params.ema_steps + 1), 1 / state.seen)
        state.average += weight * (norm - state.average)

    def _follow(self, step: int, loss: float) -> Outcomes:
        """Take a loss: whether it stays up behind what was found."""
        state = self.state
        if not math.isfinite(loss):
            return
        state.loss = loss
        if not state.found or state.loss_before is None:
            return
        state.after = [*state.after, loss][-_STAYS:]
        if state.calm == 0:
            state.calm_since = step
        state.calm += 1
        if len(state.after) < _NEWEST:
            return
        newest = median(state.after[-_NEWEST:])
        if not _is_up(newest, state.loss_before):
            state.found = False
        elif state.calm >= _LEVEL:
            reason = (
                "the gradient norm has been near its moving average since step "
                f"{state.calm_since}; the loss has not recovered: it is {newest:.4g} after "
                f"{state.loss_before:.4g}, and later norms are compared with this level"
            )
            state.found, state.loss_before = False, newest
            yield Clear(step, since=state.calm_since, reason=reason)
        elif len(state.after) >= _STAYS and _is_up(median(state.after), state.loss_before):
            yield self._finding(state.norm, follows=True, stays=newest)

    def _healthy(self, step: int) -> Clear | Holds:
        state = self.state
        if state.found and state.loss_before is not None:
            return Holds(step)  # as long as the loss is up, or may be
        if state.loss is not None:
            state.loss_before = (
                state.loss
                if state.loss_before is None
                else state.loss_before + 0.1 * (state.loss - state.loss_before)
            )
        return Clear(step, reason=f"the gradient norm is near its moving average at step {step}")

    def _loss_follows(self) -> bool:
        loss, before = self.state.loss, self.state.loss_before
        return loss is not None and before is not None and _is_up(loss, before)

    def _finding(self, norm: float, *, follows: bool, stays: float | None = None) -> Finding:
        state, params = self.state, self.params
        average = max(state.average, 1e-30)
        facts = [
            fact("gradient_norm", norm, limit=params.factor * average),
            fact("moving_average", average),
            fact("ratio", norm / average, limit=params.factor),
        ]
        if state.loss is not None:
            facts.append(fact("loss", state.loss))
        reason = (
            f"the gradient norm is {norm:.4g}, {norm / average:,.0f} times its moving average of "
            f"{average:.4g}, since step {state.first_step}"
        )
        if stays is not None:
            reason += (
                f"; the loss has followed and stays high: {stays:.4g} after "
                f"{state.loss_before:.4g}, for {_STAYS} losses"
            )
        elif follows:
            reason += f"; the loss has followed: {state.loss:.4g} after {state.loss_before:.4g}"
        return Finding(
            subject=Subject(kind="scalar", name="gradient_norm"),
            reason=reason,
            first_step=state.first_step,
            first_rank=state.rank_series.rank,
            onset_ms=state.first_ms,
            severity="critical" if stays is not None else None,
            facts=tuple(facts),
            series=state.rank_series.series("gradient_norm", limit=params.factor * average),
            explanation="outliers do not enter the moving average; each was also more than "
            "twice the largest norm seen lately",
        )


def _points(frame: StepFrame, column: str) -> list[tuple[int, float]]:
    values = frame.column(column)
    return [] if values is None else list(zip(frame.steps.tolist(), values.tolist(), strict=True))


def _is_up(loss: float, before: float) -> bool:
    return loss - before > abs(before)
