"""`loss_diverged`: the loss has left for good, far above where it has been.

With ref the lowest of the first loss and the later running medians over `for_steps`, and scale the
standard deviation of all losses so far (each cut at the warning's limit), a factor F is exceeded
when the median of the last `for_steps` losses > ref + (F - 1) · max(abs(ref), scale). The running
spread keeps a memorised data set, with losses near zero, from counting as a small reference. Above
`factor` it is a warning, above `critical_factor` critical (branch `risen`), if it is much worse
than at first, too: a cross-entropy above what a guess costs and as many times its first value; any
other loss `quick_factor` times its first value. The errors of Q-learning and of a value function
grow with the values, to sixty times and more after the first reward of a sparse task; an
autoencoder whose inputs become noisy at once stays at ten times its level: all are well.

What goes up steeply is warned of earlier: above `early_factor` by the median of `early_steps`, and
above `quick_factor` by that of three. Of 22 healthy programs with up to eight seeds the highest was
Q-learning, whose losses grow with the values: 1.8 on 50 steps, 2.4 on 20, 6.4 on 10 and 11 on
three; all but it stayed below 1.5 on three.

Losses that begin below 0.01, or are ever negative, have no size of their own: those of policy
gradients begin near zero, and rise while all is well (of eight runs of REINFORCE five reached 2 to
200 times the reference). Those of several optimizers work against each other. Both are judged after
the first `for_steps` steps, by the critical factor alone, with the spread of those first losses as
the least scale, and no more than warned of.

A cross-entropy that begins at a tenth of what a guess costs, the logarithm of the number of
classes, or below says at first how easy the beginning is: against a queue of random keys, as in
momentum contrast, it rises from 0.06 to 4.1 of 5.5 while all is well. Half a guess is then the
least scale: what is no worse than a guess has not diverged.

A loss that is minimised has a lower bound. One that began at or above it and falls to
`quick_factor` times its own first size below zero has none (branch `falling`): its sign is wrong,
or a term of it can be made as negative as the model likes. Where the source says that it is a
cross-entropy, three first losses about minus the logarithm of the number of classes, which is where
it begins but for the sign, are as sure (`wrong_sign`). Warnings, and not for several optimizers: a
critic's loss has no bound, and a generator may well raise another's.

Beyond a hundred times, the median over `quick_steps` is enough: no completed run that was looked at
comes near (the highest factor of 75 public GPT trainings was 1.04 on 50 steps and 1.13 on 10, of
small GPTs and ResNets 1.09 and 1.18), and a ResNet whose learning rate was raised a thousandfold is
beyond it after five steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.issues import Evidence, Fact, Subject
from tocsin.schemas.observed import LossInputsSeen
from tocsin.schemas.runs import RunData
from tocsin.schemas.telemetry import StepFrame
from tocsin.stream_rules.lead import Lead
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    event,
    scalar,
)

_TINY: Final = 1e-6
"""A reference and spread below this are nothing to compare with."""

_BEGINS: Final = (0.6, 1.6)
"""Within which multiples of the logarithm of the number of classes a cross-entropy begins."""

_CLASSES: Final = {"cross_entropy": 0, "nll_loss": 0, "binary_cross_entropy_with_logits": 2}
"""Losses of classes, and how many; 0: as many as there are scores."""

_BURST: Final = 3
"""Losses whose median says that it rises or falls steeply."""

_EASY: Final = 0.1
"""A cross-entropy that begins below this share of a guess's has an easy beginning."""

_SMALL_START: Final = 0.01
"""A loss that begins below this, or is ever negative, is no measure of what is bad."""


class LossDivergedParams(Params):
    """Parameters of `loss_diverged`."""

    factor: float = Field(default=3.0, gt=1)
    """Above it, a warning. Unit: multiples of the reference."""
    critical_factor: float = Field(default=10.0, gt=1)
    """Above it, critical. Unit: multiples of the reference."""
    for_steps: int = Field(default=50, ge=3)
    """Length of the running median. Unit: steps."""
    early_factor: float = Field(default=6.0, gt=1)
    """Above it, a warning after `early_steps`. Unit: multiples of the reference."""
    early_steps: int = Field(default=20, ge=3)
    """Length of the median that warns early. Unit: steps."""
    quick_factor: float = Field(default=100.0, gt=1)
    """Above it, critical after `quick_steps`. Unit: multiples of the reference."""
    quick_steps: int = Field(default=10, ge=3)
    """Length of the short median. Unit: steps."""


@dataclass(slots=True)
class _State:
    lead: Lead = field(default_factory=Lead)
    recent: list[float] = field(default_factory=list)
    reference: float = math.inf
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    high_since: int | None = None
    high_ms: int = 0
    natural: bool = True
    early: float = 0.0
    """The spread of the first losses, none of them cut; 0 until there are enough."""
    first: float = 0.0
    first_step: int = 0
    begin: list[float] = field(default_factory=list)
    """The first losses."""
    falls: bool = False
    classes: int = 0


class LossDiverged(Rule[LossDivergedParams, _State]):
    """A warning; the same issue critical and worth a stop beyond `critical_factor`, only for one
    optimizer: losses of GAN and RL rise by nature."""

    meta = RuleMeta(
        name="loss_diverged",
        version=2,
        family="progress",
        meaning="The training loss has risen far above where it was, and stays there.",
        severity="warning",
        stop_worthy=True,
        stops_because="ten times above where it was and began, for 50 steps with one optimizer, "
        "no loss of a completed run has been; what it had learned is gone, and goes on costing",
        inputs=(scalar("loss"), event(LossInputsSeen, beside=True)),
        capture_hint="the loss is seen when backward() is called on it; else run.log it as 'loss'",
        remedy="Lower the learning rate or lengthen its warm-up, clip gradients, and go on from "
        "the checkpoint named here; look at the data around the first step.",
        branches={
            "risen": "It is many times above where it was.",
            "falling": "It falls without a lower bound.",
            "wrong_sign": "It is minus a cross-entropy.",
        },
        history_steps=200,
        params=LossDivergedParams,
        does_not_see="A loss that rises slowly and stays below three times its reference, and one "
        "that was never lower: `loss_not_decreasing` has both. Of a loss that is negative, begins "
        "at zero or is one of several optimizers', only what is ten times as far away as the first "
        "losses are from each other.",
        resolve_after_steps=50,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Iterable[Outcome]:
        state = self.state
        if isinstance(data, LossInputsSeen) and data.mode == "train" and not state.classes:
            state.classes = (
                (_CLASSES[data.function] or data.classes) if (data.function in _CLASSES) else 0
            )
            # The losses may have come before it.
            yield from self._wrong_sign(at)

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        if self.state.lead.overtaken_by(frame):
            self.state = _State(lead=self.state.lead, classes=self.state.classes)
        if not self.state.lead.takes(frame):
            return
        for step, loss in self.state.lead.points(frame, "loss"):
            if math.isfinite(loss):
                yield from self._point(step, loss, at)

    def _point(self, step: int, loss: float, at: Moment) -> Iterable[Outcome]:
        state, params = self.state, self.params
        state.recent.append(loss)
        if len(state.begin) < _BURST:
            state.begin.append(loss)
        if len(state.recent) > params.for_steps:
            del state.recent[0]
        if state.count == 0:
            state.reference = state.first = loss
            state.first_step = step
            state.natural = loss >= _SMALL_START
        state.natural = state.natural and loss >= 0 and at.run.optimizers == 1
        if state.count == params.for_steps - 1:
            state.early = statistics.pstdev(state.recent)
        self._spread(min(loss, self._limit(params.factor)))
        median = _median(state.recent)
        if len(state.recent) >= min(params.quick_steps, params.for_steps):
            state.reference = min(state.reference, median)
        if loss <= self._limit(self._least_factor()):
            state.high_since = None
        elif state.high_since is None:
            state.high_since, state.high_ms = step, at.now_ms
        if state.count == _BURST:
            yield from self._wrong_sign(at)
        yield from self._falling(step, alone=at.run.optimizers == 1)
        if not state.falls:
            yield from self._judge(step, median)

    def _wrong_sign(self, at: Moment) -> Iterable[Outcome]:
        """Whether the first losses are minus those of a cross-entropy."""
        state = self.state
        if state.count < _BURST or state.classes < 2 or at.run.optimizers != 1:
            return
        usual = math.log(state.classes)
        low, high = (times * usual for times in _BEGINS)
        if len(state.begin) < _BURST or not all(low < -loss < high for loss in state.begin):
            return
        state.falls = True
        reason = (
            f"the loss begins at {state.first:.4g}: a cross-entropy of {state.classes} classes "
            f"begins at {usual:.4g}, so its sign is wrong"
        )
        yield self._below("wrong_sign", state.first_step, reason, state.first, -usual)

    def _falling(self, step: int, *, alone: bool) -> Iterable[Outcome]:
        """Whether it has no lower bound."""
        state = self.state
        now = _median(state.recent[-_BURST:])
        limit = -self.params.quick_factor * abs(state.first)
        if not alone or abs(state.first) < _SMALL_START or state.count < _BURST or now > limit:
            if state.falls and now > 0:
                state.falls = False
                yield Clear(step, about="falling")
            return
        state.falls = True
        reason = (
            f"the loss has fallen to {now:.4g} from {state.first:.4g} at first: it seems to have "
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
            first_rank=state.lead.rank,
            remedy="See whether the loss has the right sign, and whether a term of it (a logarithm "
            "of a variance or a density) is bounded.",
            severity="warning",
            stop_worthy=False,
            evidence=Evidence(
                facts=(
                    Fact(name="loss", value=now, limit=limit),
                    Fact(name="first_loss", value=state.first),
                ),
                series=state.lead.series("loss", limit=limit),
            ),
        )

    def _judge(self, step: int, median: float) -> Iterable[Outcome]:
        state, params = self.state, self.params
        full = len(state.recent) >= params.for_steps
        if not state.natural and state.count <= params.for_steps:
            return
        short = _median(state.recent[-params.quick_steps :])
        if len(state.recent) >= params.quick_steps and short > self._limit(params.quick_factor):
            yield self._finding(step, short, params.quick_factor, params.quick_steps)
        elif full and median > self._limit(params.critical_factor):
            yield self._finding(step, median, params.critical_factor, params.for_steps)
        elif full and state.natural and median > self._limit(params.factor):
            yield self._finding(step, median, params.factor, params.for_steps)
        elif (early := self._early()) is not None:
            factor, over = early
            yield self._finding(step, _median(state.recent[-over:]), factor, over, warns=True)
        else:
            yield Clear(step)

    def _early(self) -> tuple[float, int] | None:
        """By which factor and over how many losses it has risen steeply; None: it has not."""
        state, params = self.state, self.params
        for factor, over in (
            (params.quick_factor, _BURST),
            (params.early_factor, params.early_steps),
        ):
            known = state.natural and len(state.recent) >= over
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
        state = self.state
        spread = math.sqrt(state.squares / state.count) if state.count else 0.0
        guess = math.log(state.classes) if state.classes >= 2 else 0.0
        easy = 0.5 * guess if state.first < _EASY * guess else 0.0
        return max(abs(state.reference), spread, 0.0 if state.natural else state.early, easy)

    def _least_factor(self) -> float:
        """Above which something may be said."""
        params = self.params
        return params.factor if self.state.natural else params.critical_factor

    def _limit(self, factor: float) -> float:
        scale = self._scale()
        return self.state.reference + (factor - 1) * scale if scale >= _TINY else math.inf

    def _hopeless(self) -> float:
        """Above which the loss is far worse than that of a model that has learned nothing."""
        state, params = self.state, self.params
        if state.classes >= 2:
            return max(params.critical_factor * state.first, math.log(state.classes))
        return params.quick_factor * state.first

    def _finding(
        self, step: int, median: float, factor: float, over: int, *, warns: bool = False
    ) -> Finding:
        state = self.state
        critical = (
            state.natural
            and factor >= self.params.critical_factor
            and median > self._hopeless()
            and not warns
        )
        limit = self._limit(factor)
        times = 1 + (median - state.reference) / self._scale()
        first = state.high_since if state.high_since is not None else step
        return Finding(
            branch="risen",
            subject=Subject(kind="loss", name="loss"),
            reason=f"the median of the last {over} losses is {median:.4g}, {times:,.0f} times the "
            f"reference of {state.reference:.4g}; above the limit since step {first}",
            first_step=first,
            first_rank=state.lead.rank,
            onset_ms=state.high_ms if state.high_since is not None else None,
            severity="critical" if critical else None,
            stop_worthy=critical,
            evidence=Evidence(
                facts=(
                    Fact(name="median", value=median, limit=limit),
                    Fact(name="reference", value=state.reference),
                    Fact(name="scale", value=self._scale()),
                    Fact(name="factor", value=times, limit=factor),
                    Fact(name="median_over", value=float(over), unit="steps"),
                ),
                series=state.lead.series("loss", limit=limit),
                explanation="the reference is the lowest of the first loss and the running "
                "medians; one factor is its size or the losses' spread, whichever is larger",
            ),
        )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
