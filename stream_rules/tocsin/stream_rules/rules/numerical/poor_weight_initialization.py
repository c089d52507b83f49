"""`poor_weight_initialization`: the first steps show that training cannot start from these weights.

The rule checks the first `steps` steps of a run that starts at step 0. It has three conditions:

- variance_ratio: of the layers whose activations have the same kind of summary, the variance of one
  is more than `threshold` times that of an earlier one, and its standard deviation above
  `least_std` (the signal grows from layer to layer), or it is less than 1 / `threshold_shrinking`
  of that of an earlier one. Layers with a constant output, such as zero, are ignored. If the signal
  grows after an update that replaced most of the weights, although gradients were no larger than
  the weights, the learning rate is too high: `weight_update_ratio` reports it.
- narrow_gradients: in the first `for_summaries` summaries at least `share` of the gradients are
  narrow: p95 - p05 and the standard deviation are below `distribution_range` times the largest
  gradient of the model. A summary in which gradients rise from exact zeros does not count: a last
  layer or a residual branch that starts at zero is good practice.
- flat_loss: the first `patience` losses of the run are within `flat_within` of each other, although
  there are gradients and a learning rate is not zero. The default is the rounding error of sums in
  float32, so not even another batch changes the loss. A loss of zero is ignored, and so is one that
  is 10 % below the first loss of the run: a step or two may solve a small problem.

The reference (SageMaker Debugger) compares variances of the inputs of activations; this rule
compares variances of their outputs, which are what is captured. In 15 healthy trainings
(perceptrons of 3 to 8 layers, convolutions with and without normalisation, residual blocks, an
autoencoder; PyTorch's own initial weights, Xavier's, Kaiming's) variances shrank by up to 3,700
times with the depth and grew by 1.3 times, standard deviations were below 3, the median gradient
was above 5e-4 of the largest one, and a quarter of the gradients were narrow at most (biases in
front of a normalisation). Weights that were 10 times too large made the variance grow 350 times
within three layers; weights with a standard deviation of 1 made it grow 845 to 3,000,000 times.
Weights of 0.001 gave gradients of 2e-8 (a CNN) to 1e-11 of the largest one, and weights that were
all zero or one constant gave zeros. The defaults 100, 100,000, 10 and 1e-7 follow from this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Series, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows, doubles, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar, tensors
from tocsin.stream_rules.signals.initial_learning_rate import InitialLearningRate

VARIANCE, NARROW, FLAT = "variance_ratio", "narrow_gradients", "flat_loss"
_MIN_ROWS: Final = 4
"""Gradients that a model must have for a share of them to mean something."""

_LEARNT: Final = 0.1
"""A loss that is so much below the first one has been learnt. Unit: share of the first one."""


class PoorWeightInitializationParams(Params):
    """Parameters of `poor_weight_initialization`."""

    threshold: float = Field(default=100.0, gt=1)
    """Growth factor of the variance of a later layer that counts."""
    threshold_shrinking: float = Field(default=100_000.0, gt=1)
    """Shrink factor of the variance of a later layer that counts."""
    least_std: float = Field(default=10.0, ge=0)
    """Minimum standard deviation of a layer that counts as grown."""
    distribution_range: float = Field(default=1e-7, gt=0)
    """Range of a gradient (p95 - p05) below which it is narrow. Unit: of the largest gradient."""
    relative: bool = True
    """Whether that range is relative to the model's largest gradient, or absolute."""
    share: float = Field(default=0.4, ge=0, le=1)
    """Share of the gradients that must be narrow; 0: any one. Unit: share, 1 is all."""
    for_summaries: int = Field(default=2, ge=1)
    """How many summaries of the gradients, from the first one on. Unit: summaries."""
    patience: int = Field(default=10, ge=2)
    """How many consecutive losses must be flat. Unit: steps."""
    flat_within: float | None = Field(default=1e-6, ge=0)
    """How far apart flat losses may be; none: every loss is flat that is not below all earlier
    ones. Unit: share of their size."""
    steps: int = Field(default=10, ge=1)
    """How many steps after the first one the rule checks. Unit: steps."""


@dataclass(slots=True)
class _State:
    first_step: int | None = None
    activations: dict[str, LowestRankRows] = field(default_factory=dict)
    gradients: LowestRankRows = field(default_factory=LowestRankRows)
    updates: LowestRankRows = field(default_factory=LowestRankRows)
    gradient: float | None = None
    """The norm of the first gradients of all; None: it is not known."""
    first: InitialLearningRate = field(default_factory=InitialLearningRate)
    overwritten: int | None = None
    """The step that made the weights anew, from gradients of a usual size."""
    summaries: int = 0
    narrow: int = 0
    narrow_since: int = 0
    narrow_ms: int = 0
    was_zero: bool = False
    flowing: bool = False
    """Whether any gradient was seen that is not zero."""
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    first_loss: float | None = None
    lowest: float | None = None
    highest: float = 0.0
    flat: int = 0
    flat_ms: int = 0
    over: bool = False
    found: list[str] = field(default_factory=list)


class PoorWeightInitialization(Rule[PoorWeightInitializationParams, _State]):
    """One episode for each branch; it ends when the condition does, however late."""

    meta = RuleMeta(
        name="poor_weight_initialization",
        version=2,
        family="numerical",
        meaning="The first steps show that the initial weights are too large, too small or alike.",
        severity="warning",
        available="maybe",
        inputs=(
            tensors("activations"),
            tensors("gradients"),
            scalar("loss"),
            scalar("lr.*", optional=True),
            tensors("updates", optional=True),
        ),
        capture_hint="activations of PyTorch modules and gradients are captured in the first "
        "steps, when a PyTorch optimizer steps",
        remedy="Use the initialisation that matches the activation (Kaiming for ReLU, Xavier for "
        "tanh), add normalisation between the layers, and check that the inputs are normalised.",
        does_not_see="Runs whose first step is not 0, layers whose activation is a function "
        "(torch.relu), and models of one or two layers with weights that are too large: the loss "
        "and the size of the updates show those.",
        branches={
            VARIANCE: "The variance of the activations grows or shrinks from layer to layer.",
            NARROW: "Most gradients are tiny compared with the largest one.",
            FLAT: "The first losses are identical.",
        },
        alias="PoorWeightInitialization",
        params=PoorWeightInitializationParams,
        presets={
            "sagemaker": {
                "threshold": 10.0,
                "threshold_shrinking": 10.0,
                "least_std": 0.0,
                "distribution_range": 0.001,
                "relative": False,
                "share": 0.0,
                "for_summaries": 1,
                "patience": 5,
                "flat_within": None,
                "steps": 10,
            }
        },
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = True

    # -- how long ----------------------------------------------------------------------------

    def _inspects(self, step: int, branch: str) -> bool:
        """Whether this step may open an issue, or change one that is open."""
        state = self.state
        if state.first_step is None:
            state.first_step = step
        if state.first_step > 1:
            return False
        return step - state.first_step <= self.params.steps or branch in state.found

    def _found(self, branch: str) -> None:
        if branch not in self.state.found:
            self.state.found.append(branch)

    def _clear(self, step: int, branch: str) -> Outcomes:
        if branch in self.state.found:
            self.state.found.remove(branch)
            yield Clear(step, about=branch)

    # -- losses ------------------------------------------------------------------------------

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        if not frame.steps.size:
            return
        if state.first_step is None:
            state.first_step = int(frame.steps[0])
        if state.over or not state.rank_series.accepts(frame):
            return
        rates = [frame.column(name) for name in frame.columns if name.startswith("lr.")]
        # By step: points that were there already are left out.
        row_of = {step: row for row, step in enumerate(frame.steps.tolist())}
        for step, loss in state.rank_series.points(frame, "loss"):
            if not self._inspects(step, FLAT):
                # Nothing of this rule is in later losses.
                state.over, state.rank_series = True, RankSeries()
                return
            resting = bool(rates) and all(
                rate is not None and rate[row_of[step]] == 0 for rate in rates
            )
            if self._is_flat(loss) and not resting:
                if state.flat == 1:
                    state.flat_ms = at.now_ms
                if state.flat >= params.patience and state.flowing and FLAT not in state.found:
                    self._found(FLAT)
                    yield self._flat(loss)
            else:
                yield from self._clear(step, FLAT)

    def _is_flat(self, loss: float) -> bool:
        """Take a loss; whether it is one of a row of flat ones, `flat` of them by now."""
        state, within = self.state, self.params.flat_within
        if not np.isfinite(loss) or loss == 0:
            state.flat, state.lowest = 0, None
            return False
        if state.first_loss is None:
            state.first_loss = loss
        if within is not None and state.first_loss - loss > _LEARNT * abs(state.first_loss):
            state.flat, state.lowest = 0, None
            return False
        if state.lowest is None:
            state.lowest = state.highest = loss
            state.flat = 1
            return True
        low, high = min(state.lowest, loss), max(state.highest, loss)
        flat = loss >= state.lowest if within is None else high - low <= within * abs(high)
        if flat:
            state.lowest, state.highest = low, high
            state.flat += 1
            return True
        state.lowest = state.highest = loss
        state.flat = 1
        return False

    def _flat(self, loss: float) -> Finding:
        state = self.state
        steps = state.rank_series.steps
        first = steps[-state.flat] if state.flat <= len(steps) else 0
        return Finding(
            about=FLAT,
            branch=FLAT,
            subject=Subject(kind="loss", name="loss"),
            reason=f"the first {state.flat} losses are "
            + ("all" if self.params.flat_within is not None else "not below")
            + f" {state.lowest:.6g}",
            first_step=first,
            first_rank=state.rank_series.rank,
            onset_ms=state.flat_ms,
            facts=(
                fact("loss", loss),
                fact("flat_for", state.flat, limit=self.params.patience, unit="steps"),
            ),
            series=state.rank_series.series("loss"),
        )

    # -- tensors -----------------------------------------------------------------------------

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        branch = NARROW if frame.collection == "gradients" else VARIANCE
        if not self._inspects(frame.step, branch):
            return
        if frame.collection == "updates":
            self._updates(frame)
        elif branch == NARROW:
            yield from self._gradients(frame, at)
        elif "std" in frame.columns:
            yield from self._activations(frame)

    def _updates(self, frame: TensorFrame) -> None:
        state = self.state
        whole = None if state.overwritten is not None else state.updates.assemble(frame)
        if whole is None or not {"update_l2", "l2"} <= set(whole.columns):
            return
        size = doubles(whole, "l2")
        state.first.add_updates(whole.step, whole.rows, doubles(whole, "update_l2"), size)
        if state.first.thrown and state.gradient is not None:
            with np.errstate(all="ignore"):
                norm = float(np.sqrt(np.nansum(size**2)))
            if state.gradient <= norm:
                state.overwritten = state.first.step

    def _activations(self, frame: TensorFrame) -> Outcomes:
        params, key = self.params, ",".join(frame.columns)
        frames = self.state.activations.get(key)
        if frames is None:
            frames = self.state.activations[key] = LowestRankRows()
        whole = frames.assemble(frame)
        spread = None if whole is None else whole.column("std")
        if whole is None or spread is None:
            return
        variance = np.square(spread.astype(np.float64))
        some = np.flatnonzero(np.isfinite(variance) & (variance > 0))
        if len(some) < 2:
            return
        variance = variance[some]
        grown = variance / np.minimum.accumulate(variance)
        grown = np.where(np.sqrt(variance) > params.least_std, grown, 0.0)
        shrunk = np.maximum.accumulate(variance) / variance
        grows = bool(grown.max() > params.threshold)
        overwritten = self.state.overwritten
        if grows and overwritten is not None and overwritten < whole.step:
            return
        if not grows and not shrunk.max() > params.threshold_shrinking:
            yield from self._clear(whole.step, VARIANCE)
            return
        self._found(VARIANCE)
        last = int(grown.argmax() if grows else shrunk.argmax())
        before = variance[: last + 1]
        first = int(before.argmin() if grows else before.argmax())
        ratio = float(grown[last] if grows else shrunk[last])
        names = [whole.rows[i] for i in some.tolist()]
        yield Finding(
            about=VARIANCE,
            branch=VARIANCE,
            subject=Subject(kind="layer", name=names[last], collection="activations"),
            reason=f"the activations of {names[last]} have {ratio:.3g} times the variance of those "
            f"of {names[first]} at step {whole.step}"
            if grows
            else f"the activations of {names[first]} have {ratio:.3g} times the variance of those "
            f"of {names[last]}, a later layer, at step {whole.step}",
            first_step=whole.step,
            first_rank=frames.rank,
            facts=(
                fact(
                    "ratio",
                    ratio,
                    limit=params.threshold if grows else params.threshold_shrinking,
                ),
                fact("std", np.sqrt(variance[last])),
                fact("std_before", np.sqrt(variance[first])),
            ),
            followed=max(0, last - first - 1),
            also=tuple(names[first:last][:32]),
            explanation="layers in forward order, with summaries of one kind",
        )

    def _gradients(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        if "p95" not in frame.columns or "p05" not in frame.columns:
            return
        whole = state.gradients.assemble(frame)
        if whole is None:
            return
        low, high = whole.column("p05"), whole.column("p95")
        spread, largest = whole.column("std"), whole.column("absmax")
        if state.gradient is None and "l2" in whole.columns:
            with np.errstate(all="ignore"):
                state.gradient = float(np.sqrt(np.nansum(doubles(whole, "l2") ** 2)))
        if low is None or high is None:
            return
        width = high.astype(np.float64) - low
        state.flowing |= bool((width > 0).any())
        if params.relative and len(width) < _MIN_ROWS:
            return
        limit = params.distribution_range
        if params.relative:
            top = 0.0 if largest is None else float(np.nan_to_num(largest).max())
            if not top > 0 or spread is None:
                return  # all_zero says that
            limit *= top
            # Of an embedding most numbers are zero, and some are not.
            width = np.maximum(width, spread)
        narrow = width < limit
        count, zero = int(narrow.sum()), bool((width[narrow] == 0).all())
        holds = count > 0 and count >= params.share * len(narrow)
        rises = state.narrow > 0 and state.was_zero and not zero
        state.was_zero = zero
        state.summaries += 1
        # It was so from the beginning: what becomes so beside a gradient that explodes is another
        # matter.
        if not holds or rises or state.narrow < state.summaries - 1:
            state.narrow = 0
            yield from self._clear(whole.step, NARROW)
            return
        if state.narrow == 0:
            state.narrow_since, state.narrow_ms = whole.step, at.now_ms
        state.narrow += 1
        if state.narrow < params.for_summaries:
            return
        self._found(NARROW)
        # Backward order: the last row belongs to the first layer.
        rows = np.flatnonzero(narrow)[::-1]
        worst = int(rows[0])
        yield Finding(
            about=NARROW,
            branch=NARROW,
            subject=Subject(kind="tensor", name=whole.rows[worst], collection="gradients"),
            reason=f"{count} of {len(narrow)} gradients are almost zero since step "
            f"{state.narrow_since}: p95 - p05 of {whole.rows[worst]} is {width[worst]:.3g}, below "
            f"{limit:.3g}",
            first_step=state.narrow_since,
            first_rank=state.gradients.rank,
            onset_ms=state.narrow_ms,
            facts=(
                fact("range", width[worst], limit=limit),
                fact("share", count / len(narrow), limit=params.share),
            ),
            series=Series(
                name="ranges of the gradients in backward order",
                steps=tuple(range(min(128, len(width)))),
                values=tuple(width[:128].tolist()),
                limit=limit,
            ),
            followed=count - 1,
            also=named(whole.rows, rows[1:].tolist()),
        )
