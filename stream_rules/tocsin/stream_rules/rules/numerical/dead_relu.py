"""`dead_relu`: units of a ReLU that are never active, so that no signal and no gradient passes
through them.

The training process sends, for each module that is a ReLU or a ReLU6, the share of its units that
were active in less than 1 % of the values sampled from a batch. A unit is a channel of a
convolution (dimension 1), otherwise one index of the last dimension. A layer is dead when the share
is above `threshold_layer` in `for_summaries` consecutive summaries, since a single batch may not
use many units. One summary is enough when the share is above `threshold_at_once`: a layer with no
active unit passes nothing on. A layer whose output is NaN counts as neither dead nor alive.

In healthy trainings the share was 59 % at most, in the first step of eight layers with PyTorch's
own initial weights, and below 45 % from step 50 on; it was 100 % only with an injected fault.

That 1 % (SageMaker Debugger's `threshold_inactivity`) is applied in the training process, so it is
not a parameter of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Series, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows, aligned, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors


class DeadReluParams(Params):
    """Parameters of `dead_relu`."""

    threshold_layer: float = Field(default=50.0, ge=0, lt=100)
    """Share of a layer's units that must be dead. Unit: percent."""
    for_summaries: int = Field(default=3, ge=1)
    """Consecutive summaries of the activations. Unit: summaries."""
    threshold_at_once: float = Field(default=99.9, ge=0, le=100)
    """Share of dead units at which one summary is enough; 100 switches this off. Unit: percent."""


@dataclass(slots=True)
class _State:
    frames: LowestRankRows = field(default_factory=LowestRankRows)
    rows: list[str] = field(default_factory=list)
    high: StateArray = field(default_factory=lambda: np.zeros(0))
    since: StateArray = field(default_factory=lambda: np.zeros(0))
    steps: list[int] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)


class DeadRelu(Rule[DeadReluParams, _State]):
    """One episode for the run; it names the first such layer in forward order."""

    meta = RuleMeta(
        name="dead_relu",
        version=1,
        family="numerical",
        meaning="Most units of a ReLU are never active.",
        severity="warning",
        comes="maybe",
        inputs=(tensors("activations"),),
        capture_hint="activations of torch.nn.ReLU and ReLU6 are captured (for a compiled model, "
        "if capture started before its first call); calls of torch.nn.functional.relu are not seen",
        remedy="Lower the learning rate, check for large negative biases and for inputs that are "
        "not normalised. LeakyReLU and GELU do not die.",
        alias="DeadRelu",
        params=DeadReluParams,
        presets={"sagemaker": {"threshold_layer": 50.0, "for_summaries": 1}},
        does_not_see="Units of LeakyReLU, GELU and others that are never fully dead, and a ReLU "
        "that is called as a function. A layer whose dead units change over time is not reported.",
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = True

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        # A step has one frame for each set of columns; the others are not of ReLUs.
        whole = state.frames.assemble(frame) if "dead" in frame.columns else None
        dead = None if whole is None else whole.column("dead")
        if whole is None or dead is None or not len(whole.rows):
            return
        percent = 100 * dead.astype(np.float64)
        known = np.isfinite(percent)
        if not known.any():
            return
        over = percent > params.threshold_layer
        high = np.nan_to_num(aligned(whole.rows, state.rows, state.high))
        since = aligned(whole.rows, state.rows, state.since)
        state.since = np.where(over & (high == 0), whole.step, since)
        state.high = np.where(known, np.where(over, high + 1, 0), high)
        state.rows = list(whole.rows)
        state.steps = [*state.steps, whole.step][-SERIES_POINTS:]
        state.worst = [*state.worst, float(percent[known].max())][-SERIES_POINTS:]
        gone = percent > params.threshold_at_once
        high_layers = (state.high >= params.for_summaries) | (gone & (state.high > 0))
        layers = np.flatnonzero(high_layers & known)
        if len(layers):
            yield self._finding(whole, percent, [int(i) for i in layers])
        elif high_layers.any():
            yield Holds()
        else:
            yield Clear()

    def _finding(self, frame: TensorFrame, percent: Doubles, layers: list[int]) -> Finding:
        state, first = self.state, layers[0]
        name, since = frame.rows[first], int(state.since[first])
        others = f", and {len(layers) - 1} other layers" if len(layers) > 1 else ""
        return Finding(
            subject=Subject(kind="layer", name=name, collection="activations"),
            reason=f"{percent[first]:.0f} % of the units of {name} are dead since step {since}"
            f"{others}",
            first_step=since,
            first_rank=state.frames.rank,
            evidence=Evidence(
                facts=(
                    fact("dead", percent[first], limit=self.params.threshold_layer, unit="percent"),
                    fact("summaries", state.high[first]),
                ),
                series=Series(
                    name="dead units of the worst layer",
                    unit="percent",
                    steps=tuple(state.steps),
                    values=tuple(state.worst),
                    limit=self.params.threshold_layer,
                ),
                followed=len(layers) - 1,
                also=named(frame.rows, layers[1:]),
                explanation="a unit is dead if it was active in less than 1 % of a batch",
            ),
        )
