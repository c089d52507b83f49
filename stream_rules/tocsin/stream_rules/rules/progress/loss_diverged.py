"""`loss_diverged`: the loss has risen far above its earlier level and stays there.

It is a warning when the median of the newest losses stays several times above the level that the
run had reached. It is critical, and stops the run, when the rise is far beyond what healthy runs
show: ten to a hundred times, or a large part of the progress lost for hundreds of steps. The exact
conditions follow, with the measurements behind them.

Let ref be the lowest of the running medians, and scale the standard deviation of all losses so far
(each capped at the warning's limit). A factor F is exceeded when a median of the newest losses >
ref + (F - 1) · max(abs(ref), scale). The scale keeps the losses near zero of a memorised data set
from becoming too small a reference. If the median of `for_steps` losses exceeds `factor`, it is a
warning; if it exceeds `critical_factor`, it is critical (branch `risen`), provided that the loss is
also much worse than at the start. For a cross-entropy this means: above the cost of a guess, and
above `critical_factor` times its initial loss. For any other loss: above `quick_factor` times what
its first 50 losses have shown, for twice as long, and not recovering. Some healthy losses rise a
lot: the errors of Q-learning and of a value function grow with the values, sixtyfold and more after
the first reward of a sparse task, and an autoencoder whose inputs suddenly become noisy stays at
ten times its level.

One batch is not a reference: it may be empty, easy or the quiet start of time-ordered data. The
initial loss of a run is the median of its first 20 losses. The running median is over `for_steps`
losses, for a cross-entropy also over `quick_steps`. For a cross-entropy, the cost of a guess is a
reference from the first loss on, if it is not higher. No run is stopped before its 50th loss,
because so early a loss alone does not distinguish a hard batch from a ruined model. The exception
is a step that has changed half of the weights by more than half of their norm
(`weight_update_ratio` has the figures).

A steep rise causes an earlier warning: if the median of `early_steps` losses exceeds
`early_factor`, or the median of three exceeds `quick_factor`. In 22 healthy programs with up to
eight seeds, the highest factors were those of Q-learning, whose losses grow with the values: 1.8
over 50 steps, 2.4 over 20, 6.4 over 10 and 11 over three; all others stayed below 1.5 over three. A
cross-entropy is critical as soon as its median over `quick_steps` exceeds `quick_factor`, a hundred
by default. No completed run that was checked comes near that: the highest factor of 75 public GPT
trainings was 1.04 over 50 steps and 1.13 over 10, and of small GPTs and ResNets 1.09 and 1.18. A
ResNet whose learning rate was raised a thousandfold exceeds it after five steps.

A cross-entropy starts at the cost of a guess, so even a model that has forgotten everything is
nowhere near ten times its initial loss. Here the rule uses the lost share of the progress (branch
`lost`): L = (median of `for_steps` - lowest) / (start - lowest), where start is the cost of a
guess, or, if that is not known, the median of the first 20 losses. In 474 public series of healthy
trainings with one optimizer and at least 150 points, the largest L that lasted for 200 points was
0.13 (BERT; diffusion 0.10, detection 0.09, fine-tuning 0.06, 75 GPTs 0.02). In the documented
spikes and divergences of BigScience's models, L was 0.17 to 0.52 for 200 points; over 500 points it
was 0.49 where the model was abandoned, and 0.01 where it recovered. So more than `lost_share` for
`lost_for` losses is a warning. More than `lost_critical_share` for `lost_critical_for` losses is
critical and stop-worthy for a vocabulary of at least 1,000, unless the loss has recovered a third
of its rise or is still falling by 4 % in 250 losses, as it does after a change of the data. With
fewer classes, a harder stage of the data may cost as much, so more than 0.85 must be lost. Issues
of the branches `lost` and `risen` stay open until no more than `lost_share` is lost: there is no
new level.

Losses that start below 0.01, or are ever negative, have no natural scale: policy-gradient losses
start near zero and rise in healthy runs (five of eight runs of REINFORCE reached 2 to 200 times the
reference). If several optimizers each have their own backward call, their losses work against each
other. Both kinds are checked after the first `for_steps` steps, only against the critical factor,
with the spread of those first losses as the minimum scale, and cause at most a warning.

The cost of a guess is the logarithm of the number of classes. A cross-entropy that starts at a
tenth of that or below only shows that the start is easy: against a queue of random keys, as in
momentum contrast, the loss of a healthy run rises from 0.06 to 4.1, where a guess costs 5.5. Half
the cost of a guess is then the minimum scale: a loss that is not worse than a guess has not
diverged.

If the first three losses all exceed three times the cost of a guess, the loss is not a plain
cross-entropy: it is summed, or has extra terms (as in detectors). The cost of a guess is then not a
reference, unless the first loss is about that cost times the micro-batches of a step: a program
that accumulates gradients and does not divide its losses. Of 47 recorded classifiers, the highest
started at 1.02 times a guess, except for three with corrupted initial weights. A variational
autoencoder, whose loss is a sum, started at 63 times. YOLO, whose loss is multiplied by the batch
size and which has no box to find at first, started at 11 times; its loss rises tenfold in its first
healthy epochs.

The loss of a model that acts in an environment (reinforcement learning) is not checked: PPO at its
defaults loses 18 to 154 % of its progress for hundreds of steps while it learns to balance a pole,
since its errors grow with the values that it reaches.

A loss that is minimised has a lower bound. If a loss falls to minus `quick_factor` times its
initial size, it has none (branch `falling`): its sign is wrong, or the model can make one of its
terms as negative as it likes. For a loss that is known to be a cross-entropy, it is equally certain
if the first three losses are about minus the logarithm of the number of classes, its normal start
with the wrong sign (`wrong_sign`). These are warnings, and do not apply to runs with several
losses: a critic's loss has no bound, and a generator may raise another one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.program_facts import LossInputsSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows
from tocsin.stream_rules.rule import Params, RuleMeta, event, scalar, tensors
from tocsin.stream_rules.rule_bases import SeriesRule, SeriesState
from tocsin.stream_rules.signals.initial_learning_rate import InitialLearningRate
from tocsin.stream_rules.signals.lost_progress import LEARNED, LEARNED_UNKNOWN, LostProgress
from tocsin.stream_rules.signals.step_losses import StepLosses

_TINY: Final = 1e-6
"""A reference and spread below this are nothing to compare with."""

_BEGINS: Final = (0.6, 1.6)
"""Within which multiples of the logarithm of the number of classes a cross-entropy begins."""

_CLASSES: Final = {"cross_entropy": 0, "nll_loss": 0, "binary_cross_entropy_with_logits": 2}
"""Losses of classes, and how many; 0: as many as there are scores."""

_BURST: Final = 3
"""Losses whose median shows that it rises or falls steeply."""

_EASY: Final = 0.1
"""A cross-entropy that begins below this share of a guess's has an easy beginning."""

_SUM: Final = 3.0
"""One that begins above this multiple of it is none alone."""

_SMALL_START: Final = 0.01
"""A loss that begins below this, or is ever negative, is no measure of what is bad."""

_FIRST: Final = 20
"""Losses whose median is what a run began with."""

_MIN_LOSSES: Final = 50
"""Losses that no run is stopped before, unless its weights are known to be ruined."""

_VOCABULARY: Final = 1000
"""Classes from which on a cross-entropy is like a language model's."""

_FORGOTTEN: Final = 0.85
"""The lost share of a classifier that is back at a guess."""

_LASTS: Final = 2
"""Multiples of `for_steps` for which a loss that is no cross-entropy must be high."""

_COMES_BACK: Final = 0.7
"""Newest losses against those of the whole median: below it, a loss is on its way back."""


class LossDivergedParams(Params):
    """Parameters of `loss_diverged`."""

    factor: float = Field(default=3.0, gt=1)
    """Warning above this factor. Unit: multiples of the reference."""
    critical_factor: float = Field(default=10.0, gt=1)
    """Critical above this factor, if a cross-entropy is also worse than a guess and above this
    multiple of its initial value, or any other loss above `quick_factor` times its initial value.
    Unit: multiples of the reference."""
    for_steps: int = Field(default=50, ge=3)
    """Length of the running median. Unit: losses."""
    early_factor: float = Field(default=6.0, gt=1)
    """Early warning above this factor, after `early_steps`. Unit: multiples of the reference."""
    early_steps: int = Field(default=20, ge=3)
    """Length of the median for the early warning. Unit: losses."""
    quick_factor: float = Field(default=100.0, gt=1)
    """Above this factor, a cross-entropy is critical after `quick_steps`, and any loss causes a
    warning after three. Unit: multiples of the reference."""
    quick_steps: int = Field(default=10, ge=3)
    """Length of the short median. Unit: losses."""
    lost_share: float = Field(default=0.15, gt=0, lt=1)
    """Warning if more than this is lost for `lost_for` losses. Unit: share of the loss's fall until
    then."""
    lost_for: int = Field(default=200, ge=1)
    """How long. Unit: losses."""
    lost_critical_share: float = Field(default=0.4, gt=0, lt=1)
    """A cross-entropy of many classes is critical if more than this is lost for `lost_critical_for`
    losses. Unit: share of the loss's fall until then."""
    lost_critical_for: int = Field(default=500, ge=1)
    """How long. Unit: losses."""


@dataclass(slots=True)
class _State(SeriesState):
    recent: list[float] = field(default_factory=list)
    lowest: float = math.inf
    """Of the running medians over `for_steps`."""
    lowest_short: float = math.inf
    """Of those over `quick_steps`."""
    shown: float = -math.inf
    """The highest of those over `quick_steps` among the first losses."""
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    high_since: int | None = None
    high_ms: int = 0
    high_for: int = 0
    """How many losses in a row are above the limit."""
    signed: bool = False
    """Whether a loss was ever negative."""
    early: float = 0.0
    """The spread of the first losses, none of them cut; 0 until there are enough."""
    first_step: int = 0
    begin: list[float] = field(default_factory=list)
    """The first losses."""
    falls: bool = False
    classes: int = 0
    alone: bool = False
    """Whether all optimizers are known to share the loss."""
    losses: StepLosses = field(default_factory=StepLosses)
    lost: LostProgress = field(default_factory=LostProgress)
    updates: LowestRankRows = field(default_factory=LowestRankRows)
    first_update: int | None = None
    ruin: InitialLearningRate = field(default_factory=InitialLearningRate)


class LossDiverged(SeriesRule[LossDivergedParams, _State]):
    """A warning; it becomes critical and stops the run if the model has lost what it learned. Runs
    with several losses (GAN, RL), which rise by nature, are never stopped."""

    meta = RuleMeta(
        name="loss_diverged",
        version=3,
        family="progress",
        meaning="The training loss has risen far above its earlier level and stays there.",
        severity="warning",
        stop_worthy=True,
        stops_because="no completed run that we examined had such a loss, and every further step "
        "is wasted money: a cross-entropy ten times above its past and its beginning, a language "
        "model that has lost 40 % of its progress for 500 losses and does not regain it, any other "
        "loss a hundred times above its first 50; never before 50 losses unless one step has "
        "ruined the weights, and only with a single loss",
        inputs=(
            scalar("loss"),
            event(LossInputsSeen, optional=True),
            tensors("updates", optional=True),
        ),
        capture_hint="the loss is captured when backward() is called on it; otherwise log it with "
        "run.log as 'loss'",
        remedy="Lower the learning rate or lengthen its warm-up, clip gradients, and continue from "
        "a checkpoint before the first bad step; inspect the data around that step.",
        branches={
            "risen": "The loss is many times above its earlier level.",
            "lost": "The loss has lost much of its progress and does not regain it.",
            "falling": "The loss falls without a lower bound.",
            "wrong_sign": "The loss is a cross-entropy with the wrong sign.",
        },
        history_steps=200,
        params=LossDivergedParams,
        does_not_see="A loss that was never lower: `loss_not_decreasing` covers it. If the losses "
        "of a compiled graph cannot be identified as cross-entropies, a language model that "
        "diverges to a plateau causes a warning but no stop. For a loss that is negative, starts "
        "at zero or is one of several, only a rise of ten times the spread of the first losses "
        "counts. The loss of reinforcement learning, where an environment of Gymnasium, Gym, "
        "Stable-Baselines3, PettingZoo, dm_env or TorchRL is there at the first step.",
        resolve_after_steps=50,
    )
    state_type = _State
    column = "loss"

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        if isinstance(data, LossInputsSeen) and data.mode == "train" and not state.classes:
            state.classes = (
                (_CLASSES[data.function] or data.classes) if (data.function in _CLASSES) else 0
            )
            # The losses may have come before it.
            yield from self._wrong_sign(at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state = self.state
        if state.count >= _MIN_LOSSES:
            return ()
        whole = state.updates.assemble(frame)
        change, size = (None, None) if whole is None else map(whole.column, ("update_l2", "l2"))
        if whole is not None and change is not None and size is not None and len(whole.rows):
            state.ruin.add_updates(
                whole.step, whole.rows, change.astype(np.float64), size.astype(np.float64)
            )
        return ()

    def restarted(self) -> _State:
        state = self.state
        return _State(
            rank_series=state.rank_series,
            classes=state.classes,
            updates=state.updates,
            ruin=state.ruin,
        )

    def points(self, frame: StepFrame) -> Iterable[tuple[int, float]]:
        losses = self.state.losses.losses(frame)
        return self.state.rank_series.new(frame, losses) if losses else ()

    def on_value(self, step: int, value: float, at: Moment) -> Outcomes:
        if at.run.acts:
            return
        state, params, loss = self.state, self.params, value
        state.alone = at.run.one_loss is True
        if state.count == 0:
            state.first_step = step
        if len(state.begin) < _FIRST:
            state.begin.append(loss)
        state.recent.append(loss)
        if len(state.recent) > params.for_steps:
            del state.recent[0]
        state.signed = state.signed or loss < 0
        if state.count == params.for_steps - 1:
            state.early = statistics.pstdev(state.recent)
        self._spread(min(loss, self._limit(params.factor)))
        median = self._learn(step, at.now_ms)
        if loss <= self._limit(self._least_factor()):
            state.high_since, state.high_for = None, 0
        else:
            if state.high_since is None:
                state.high_since, state.high_ms = step, at.now_ms
            state.high_for += 1
        if state.count == _BURST:
            yield from self._wrong_sign(at)
        yield from self._falling(step)
        if not state.falls:
            yield from self._evaluate(step, median)

    def _learn(self, step: int, at_ms: int) -> float:
        """The running median, after it and the shorter one are noted."""
        state, params = self.state, self.params
        median = _median(state.recent)
        quick = min(params.quick_steps, params.for_steps)
        if len(state.recent) >= quick:
            short = _median(state.recent[-quick:])
            state.lowest_short = min(state.lowest_short, short)
            if state.count <= _MIN_LOSSES:
                state.shown = max(state.shown, short)
        if len(state.recent) >= params.for_steps:
            state.lowest = min(state.lowest, median)
            start = self._guess() or self._first()
            low, high = params.lost_share, params.lost_critical_share
            least = LEARNED if self._guess() else LEARNED_UNKNOWN
            state.lost.update(step, median, start, low=low, high=high, at_ms=at_ms, least=least)
        return median

    def _natural(self) -> bool:
        """Whether the loss has a size of its own."""
        state = self.state
        return state.alone and not state.signed and self._first() >= _SMALL_START

    def _first(self) -> float:
        """What the run began with."""
        return _median(self.state.begin)

    def _guess(self) -> float:
        """What a guess costs, where the loss is a cross-entropy; else 0."""
        state = self.state
        guess = math.log(state.classes) if state.classes >= 2 else 0.0
        if not guess or min(state.begin[:_BURST], default=0.0) <= _SUM * guess:
            return guess
        # The sum over the micro-batches of a step, of a program that does not divide by them.
        guess *= state.losses.usual
        low, high = (times * guess for times in _BEGINS)
        return guess if low < state.begin[0] < high else 0.0

    def _reference(self) -> float:
        """What the newest losses are compared with; infinite while it is not known."""
        state, guess = self.state, self._guess()
        if not guess:
            return state.lowest
        return min(state.lowest, state.lowest_short, max(state.begin[0], guess))

    def _wrong_sign(self, at: Moment) -> Outcomes:
        """Whether the first losses are minus those of a cross-entropy."""
        state, guess = self.state, self._guess()
        if state.count < _BURST or not guess or not at.run.one_loss:
            return
        low, high = (times * guess for times in _BEGINS)
        if not all(low < -loss < high for loss in state.begin[:_BURST]):
            return
        state.falls = True
        reason = (
            f"the loss begins at {state.begin[0]:.4g}: a cross-entropy of {state.classes} classes "
            f"begins at {guess:.4g}, so its sign is wrong"
        )
        yield self._below("wrong_sign", state.first_step, reason, state.begin[0], -guess)

    def _falling(self, step: int) -> Outcomes:
        """Whether it has no lower bound."""
        state, first = self.state, self._first()
        now = _median(state.recent[-_BURST:])
        limit = -self.params.quick_factor * abs(first)
        if not state.alone or abs(first) < _SMALL_START or state.count < _BURST or now > limit:
            if state.falls and now > 0:
                state.falls = False
                yield Clear(step, about="falling")
            return
        state.falls = True
        reason = (
            f"the loss has fallen to {now:.4g} from {first:.4g} at first: it seems to have "
            "no lower bound"
        )
        yield self._below("falling", step, reason, now, limit)

    def _below(self, branch: str, step: int, reason: str, now: float, limit: float) -> Finding:
        state = self.state
        return Finding(
            about="falling",
            branch=branch,
            subject=Subject(kind="loss", name="loss"),
            reason=reason,
            first_step=step,
            first_rank=state.rank_series.rank,
            remedy="Check that the loss has the right sign, and that each of its terms (such as a "
            "logarithm of a variance or a density) is bounded.",
            severity="warning",
            stop_worthy=False,
            facts=(
                fact("loss", now, limit=limit),
                fact("first_loss", self._first()),
            ),
            series=state.rank_series.series("loss", limit=limit),
        )

    def _evaluate(self, step: int, median: float) -> Outcomes:
        state, params = self.state, self.params
        full = len(state.recent) >= params.for_steps
        natural = self._natural()
        if not natural and state.count <= params.for_steps:
            return
        short = _median(state.recent[-params.quick_steps :])
        # Of a loss that falls quickly, the longer median is still above where the newest are.
        lasting = min(median, short)
        quick = len(state.recent) >= params.quick_steps and self._guess() > 0
        if quick and short > self._limit(params.quick_factor):
            yield self._risen(step, short, params.quick_factor, params.quick_steps)
        elif full and lasting > self._limit(params.critical_factor):
            yield self._risen(step, median, params.critical_factor, params.for_steps)
        elif natural and self._is_lost():
            yield self._lost(median)
        elif full and natural and lasting > self._limit(params.factor):
            yield self._risen(step, median, params.factor, params.for_steps)
        elif (early := self._early()) is not None:
            factor, over = early
            yield self._risen(step, _median(state.recent[-over:]), factor, over, warns=True)
        elif natural and state.lost.above_low > 0:
            yield Holds(step)  # what has risen is not over as long as progress is lost
        else:
            was = f"the lowest was {state.lowest:.4g}" if full else "it has few losses so far"
            yield Clear(step, reason=f"the loss is back at {short:.4g} at step {step}; {was}")

    def _early(self) -> tuple[float, int] | None:
        """By which factor and over how many losses it has risen steeply; None: it has not."""
        state, params = self.state, self.params
        for factor, over in (
            (params.quick_factor, _BURST),
            (params.early_factor, params.early_steps),
        ):
            known = self._natural() and len(state.recent) >= over
            if known and _median(state.recent[-over:]) > self._limit(factor):
                return factor, over
        return None

    def _spread(self, value: float) -> None:
        state = self.state
        state.count += 1
        delta = value - state.mean
        state.mean += delta / state.count
        state.squares += delta * (value - state.mean)

    def _scale(self) -> float:
        return self._unit()[0]

    def _unit(self) -> tuple[float, str]:
        """The size of one factor, and what it is."""
        state, guess, reference = self.state, self._guess(), self._reference()
        spread = math.sqrt(state.squares / state.count) if state.count else 0.0
        easy = 0.5 * guess if min(state.begin[:_BURST]) < _EASY * guess else 0.0
        return max(
            (abs(reference), ""),
            (spread, "the spread of the losses"),
            (0.0 if self._natural() else state.early, "the spread of the first losses"),
            (easy, "half the cost of a guess"),
        )

    def _compared(self, median: float) -> str:
        """How far above the reference it is, so that a reader can check it."""
        (scale, name), reference = self._unit(), self._reference()
        above = (median - reference) / scale
        if not name and reference > 0:
            return f"{_times(1 + above)} times the reference of {reference:.4g}"
        size = f"{name} ({scale:.4g})" if name else "its size"
        return f"{_times(above)} times {size} above the reference of {reference:.4g}"

    def _least_factor(self) -> float:
        """Above which something may be reported."""
        params = self.params
        return params.factor if self._natural() else params.critical_factor

    def _limit(self, factor: float) -> float:
        scale = self._scale()
        return self._reference() + (factor - 1) * scale if scale >= _TINY else math.inf

    def _hopeless(self) -> float:
        """Above which the loss is far worse than that of a model that has learned nothing."""
        params, guess = self.params, self._guess()
        if guess:
            return max(params.critical_factor * min(self._first(), guess), guess)
        return params.quick_factor * max(self._first(), self.state.shown)

    def _may_stop(self) -> bool:
        """Whether the run is old enough for a stop, or known to be ruined."""
        state = self.state
        return self._natural() and (state.count >= _MIN_LOSSES or state.ruin.thrown)

    def _is_lost(self) -> bool:
        return self.state.lost.above_low >= self.params.lost_for

    def _lost(self, median: float) -> Finding:
        """Of a good part of the progress that is lost."""
        state, params, lost = self.state, self.params, self.state.lost
        least = 0.0 if state.classes >= _VOCABULARY else _FORGOTTEN
        gone = lost.above_high >= params.lost_critical_for and lost.share > least
        regains = lost.comes_back(median) or lost.falls(median)
        critical = gone and self._guess() > 0 and self._may_stop() and not regains
        limit = params.lost_share
        start = self._guess() or self._first()
        level = lost.lowest + limit * (start - lost.lowest)
        return Finding(
            branch="lost",
            subject=Subject(kind="loss", name="loss"),
            reason=f"{100 * lost.share:.0f} % of the progress is lost: the median of the last "
            f"{params.for_steps} losses is {median:.4g} after {lost.lowest:.4g} at step "
            f"{lost.lowest_step}, from {start:.4g} at first; for {lost.above_low:,} losses now",
            first_step=lost.since,
            first_rank=state.rank_series.rank,
            onset_ms=lost.since_ms,
            severity="critical" if critical else None,
            stop_worthy=critical,
            facts=(
                fact("lost_share", lost.share, limit=limit),
                fact("median", median, limit=level),
                fact("lowest", lost.lowest),
                fact("start", start),
                fact("lost_for", lost.above_low, unit="losses"),
            ),
            series=state.rank_series.series("loss", limit=level),
            explanation="the share is the rise since the lowest median, of the fall from the "
            "start to it; the start of a cross-entropy is what a guess costs",
        )

    def _risen(
        self, step: int, median: float, factor: float, over: int, *, warns: bool = False
    ) -> Finding:
        state, guess = self.state, self._guess()
        newest = _median(state.recent[-self.params.quick_steps :])
        lasts = state.high_for >= _LASTS * self.params.for_steps
        critical = (
            factor >= self.params.critical_factor
            and self._may_stop()
            and median > self._hopeless()
            and (guess > 0 or (lasts and newest > _COMES_BACK * median))
            and not warns
        )
        limit, reference = self._limit(factor), self._reference()
        times = 1 + (median - reference) / self._scale()
        first = state.high_since if state.high_since is not None else step
        return Finding(
            branch="risen",
            subject=Subject(kind="loss", name="loss"),
            reason=f"the median of the last {over} losses is {median:.4g}, "
            f"{self._compared(median)}; above the limit since step {first}",
            first_step=first,
            first_rank=state.rank_series.rank,
            onset_ms=state.high_ms if state.high_since is not None else None,
            severity="critical" if critical else None,
            stop_worthy=critical,
            facts=(
                fact("median", median, limit=limit),
                fact("reference", reference),
                fact("scale", self._scale()),
                fact("factor", times, limit=factor),
                fact("median_over", over, unit="losses"),
            ),
            series=state.rank_series.series("loss", limit=limit),
            explanation="the reference is the lowest running median, or, of a cross-entropy, "
            "what a guess costs; one factor is its size or the losses' spread, whichever is "
            "larger",
        )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _times(factor: float) -> str:
    return f"{factor:,.1f}" if factor < 10 else f"{factor:,.0f}"
