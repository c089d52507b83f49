"""`loss_spike`: the loss jumps above its own noise and stays high for some steps.

With m the median of the last `window` losses, a loss is high when it is above m + max(k · s,
`least_percent` of abs(m)). The spread s is 1.4826 · MAD (the median absolute deviation) or (p90 -
m) / 1.2816 (from the 90th percentile), whichever is larger. Both estimate the standard deviation of
normal noise; the second is needed because a loss that is zero for most batches has a MAD of zero.
If both are zero, no loss is high. A spike of a few steps is part of the noise, not an issue: 75
public GPT trainings, all of which completed, have many spikes of a third that are gone at the next
step. The losses of an issue are not included in the window, so a spike does not become the new
normal.

A spike ends when three losses in a row are not high. A spike that lasts for three times
`recover_steps` is `unrecovered`: the losses alone do not show whether a model has diverged to a
plateau or learns another task. The issue stays open until three consecutive losses are back below
its limit; `loss_diverged` continues from there. Later spikes are compared with the new losses, as
separate issues, on up to four such levels. Most spikes recover by themselves: this rule never
requests a stop. It is critical only if a spike has lasted for `recover_steps` and is
`critical_factor` times as high as the initial loss (the median of its first losses), in a run with
one loss that is never near zero. In healthy runs, the next stage of a curriculum (an autoencoder
whose inputs suddenly become noisy) stays at ten times its level, and the errors of Q-learning grow
with the values. The loss of a model that acts in an environment is not checked: it jumps whenever a
target network is copied, and with the first long episode.

The losses of several optimizers with separate losses work against each other. As in a GAN whose
critic gets ahead, they rise and fall by nature, over tens of steps and many times their noise: the
loss of a healthy generator has risen from 0.68 to 0.99 in 30 steps, and by no more than 0.05 in
three. There, a rise is a spike only if three steps bring a third of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, RuleMeta, scalar
from tocsin.stream_rules.rule_bases import SeriesRule, SeriesState
from tocsin.stream_rules.signals.step_losses import StepLosses

_BACK: Final = 3
_SIGMA: Final = 1.4826
_DECILE: Final = 1.2816
_UNRECOVERED: Final = 3
"""Multiples of `recover_steps` after which a spike is unrecovered."""

_MAX_LEVELS: Final = 4
_FIRST: Final = 20
"""Losses whose median is what a run began with."""

_SMALL: Final = 0.01

_STEEP_STEPS: Final = 3
_STEEP_SHARE: Final = 1 / 3
"""Which share of a rise comes within how many steps where it is a jump; a steady rise is one
if it takes less than ten."""


class LossSpikeParams(Params):
    """Parameters of `loss_spike`."""

    k: float = Field(default=8.0, gt=0)
    """Distance above the median of a high loss. Unit: standard deviations, by the spread s."""
    window: int = Field(default=100, ge=10)
    """Number of previous losses for the median. Unit: losses."""
    least_percent: float = Field(default=10.0, ge=0)
    """Minimum distance above the median. Unit: percent of the median."""
    for_steps: int = Field(default=10, ge=1)
    """How many losses must stay high. Unit: losses."""
    recover_steps: int = Field(default=100, ge=1)
    """After how many losses without recovery it may be critical. Unit: losses."""
    critical_factor: float = Field(default=100.0, gt=1)
    """How far above the initial loss it must be to become critical: the next stage of a curriculum
    also jumps. Unit: multiples of the median of the first losses."""


@dataclass(slots=True)
class _Level:
    """An unrecovered spike: it is over when the losses are back below its limit."""

    about: str
    limit: float
    back: int = 0
    back_since: int = 0


@dataclass(slots=True)
class _State(SeriesState):
    losses: StepLosses = field(default_factory=StepLosses)
    window: list[float] = field(default_factory=list)
    limit: float | None = None
    median: float = 0.0
    high_since: int | None = None
    high_ms: int = 0
    count: int = 0
    peak: float = 0.0
    steepest: float = 0.0
    """How much it has risen at most within a few steps."""
    high: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    back_since: int = 0
    begin: list[float] = field(default_factory=list)
    """The first losses."""
    levels: list[_Level] = field(default_factory=list)
    """Unrecovered spikes, the first one first."""
    about: str = ""


class LossSpike(SeriesRule[LossSpikeParams, _State]):
    """A warning; critical once it has lasted for `recover_steps` and is far worse than the initial
    loss. Never requests a stop."""

    meta = RuleMeta(
        name="loss_spike",
        version=3,
        family="progress",
        meaning="The training loss has jumped far above its own noise and has not recovered yet.",
        severity="warning",
        inputs=(scalar("loss"),),
        capture_hint="the loss is captured when backward() is called on it; otherwise log it with "
        "run.log as 'loss'",
        remedy="Inspect the batches around the first step, and the gradient norm just before it. "
        "If it happens again, clip gradients or lower the learning rate. Many spikes recover.",
        params=LossSpikeParams,
        does_not_see="A spike in the first `window` losses, and one that ends within `for_steps` "
        "losses: those are part of the noise of most large trainings. The loss of reinforcement "
        "learning, which jumps by design. A rise over tens of steps of several losses that work "
        "against each other, as in a GAN.",
        resolve_after_steps=0,
    )
    state_type = _State
    column = "loss"

    def points(self, frame: StepFrame) -> Iterable[tuple[int, float]]:
        losses = self.state.losses.losses(frame)
        return self.state.rank_series.new(frame, losses) if losses else ()

    def on_value(self, step: int, value: float, at: Moment) -> Outcomes:
        if at.run.acts:
            return
        state, loss = self.state, value
        if len(state.begin) < _FIRST:
            state.begin.append(loss)
        yield from self._recovered(step, loss)
        if len(state.window) < self.params.window:
            self._learn([loss])
            return
        limit = self._limit()
        if not loss > limit or limit == state.median:
            yield from self._low(step, loss)
            return
        if state.high_since is None:
            state.high_since, state.high_ms = step, at.now_ms
            state.count, state.peak = 0, loss
            state.high, state.steepest = [], 0.0
            state.about = f"above_{len(state.levels)}" if state.levels else ""
        before = [*state.window[-_STEEP_STEPS:], *state.high[-_STEEP_STEPS:], *state.back]
        before = before[-_STEEP_STEPS:]
        state.steepest = max(state.steepest, loss - min(before))
        state.count += 1 + len(state.back)
        state.high = [*state.high, *state.back, loss][-self.params.window :]
        state.back = []
        state.peak = max(state.peak, loss)
        spike = at.run.one_loss is not False or self._jumped()
        if spike and state.count >= self.params.for_steps and len(state.levels) < _MAX_LEVELS:
            yield self._finding(loss, limit, one_loss=at.run.one_loss is not False)
        if state.count >= max(_UNRECOVERED * self.params.recover_steps, self.params.window):
            if spike and len(state.levels) < _MAX_LEVELS:
                state.levels.append(_Level(state.about, limit))
            state.window, state.limit = state.high, None
            state.high, state.high_since = [], None

    def _jumped(self) -> bool:
        """Whether a few steps have brought much of the rise."""
        state = self.state
        return state.steepest >= _STEEP_SHARE * (state.peak - state.median)

    def _recovered(self, step: int, loss: float) -> Outcomes:
        """Which unrecovered spikes are over after all; a higher one is no later than a lower."""
        state = self.state
        for level in state.levels:
            if loss > level.limit:
                level.back = 0
                continue
            if level.back == 0:
                level.back_since = step
            level.back += 1
        while state.levels and state.levels[-1].back >= _BACK:
            level = state.levels.pop()
            reason = (
                f"the loss is back below {level.limit:.4g} since step {level.back_since}, long "
                "after it had jumped"
            )
            yield Clear(step, about=level.about, since=level.back_since, reason=reason)

    def _low(self, step: int, loss: float) -> Outcomes:
        state = self.state
        if state.high_since is None:
            self._learn([loss])
            return
        if not state.back:
            state.back_since = step
        state.back.append(loss)
        if len(state.back) >= _BACK:
            noise = state.high if state.count < self.params.for_steps else []
            reason = (
                f"the loss is back at {loss:.4g} since step {state.back_since}: it had jumped from "
                f"{state.median:.4g} to {state.peak:.4g} at step {state.high_since}, for "
                f"{state.count} losses"
            )
            yield Clear(step, about=state.about, since=state.back_since, reason=reason)
            self._learn([*noise, *state.back])
            state.high, state.back, state.high_since = [], [], None

    def _learn(self, losses: list[float]) -> None:
        self.state.window = [*self.state.window, *losses][-self.params.window :]
        self.state.limit = None

    def _limit(self) -> float:
        state, params = self.state, self.params
        if state.limit is None:
            # Of lists this short, numpy's functions take ten times as long; this is each step's.
            losses = sorted(state.window)
            state.median = median(losses)
            deviation = _SIGMA * median(abs(loss - state.median) for loss in losses)
            decile = (_quantile(losses, 0.9) - state.median) / _DECILE
            least = params.least_percent / 100 * abs(state.median)
            state.limit = state.median + max(params.k * max(deviation, decile), least)
        return state.limit

    def _finding(self, loss: float, limit: float, *, one_loss: bool) -> Finding:
        state, params = self.state, self.params
        lasts = state.count >= params.recover_steps
        unrecovered = state.count >= max(_UNRECOVERED * params.recover_steps, params.window)
        first, level = median(state.begin), median(state.high)
        # Losses near zero or below have no size; several that work against each other rise.
        sized = first >= _SMALL and min(state.window) > 0 and one_loss
        ruined = lasts and sized and level > params.critical_factor * max(first, state.median)
        since = f" and has not recovered: it is about {level:.4g}" if lasts else ""
        return Finding(
            about=state.about,
            subject=Subject(kind="loss", name="loss"),
            reason=f"the loss has jumped from {state.median:.4g} to {state.peak:.4g} at step "
            f"{state.high_since}, and is above {limit:.4g} for {state.count} losses{since}",
            first_step=state.high_since,
            first_rank=state.rank_series.rank,
            onset_ms=state.high_ms,
            severity="critical" if ruined else None,
            facts=(
                fact("loss", loss, limit=limit),
                fact("highest", state.peak),
                fact("median_before", state.median),
                fact("above_for", state.count, unit="losses"),
                fact("state", "unrecovered" if unrecovered else "lasting" if lasts else "new"),
            ),
            series=state.rank_series.series("loss", limit=limit),
            explanation="the limit comes from the median and the spread of the losses before "
            "the spike; it ends when three losses in a row are below",
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between two neighbours in proportion, as numpy's `linear` method."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
