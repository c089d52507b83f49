"""`dead_relu`: units of a ReLU that are never active, so that no signal and no gradient passes
through them.

The training process sends, for each module that is a ReLU or a ReLU6, the share of its units that
were active in less than 1 % of the values sampled from a batch. A unit is a channel of a
convolution (dimension 1), otherwise one index of the last dimension. With gradient accumulation the
batch is the first micro-batch of the step. If it has fewer than 32 values of each unit, those of
the next micro-batches are added, and if the step has no more, those of the next summaries: a plain
batch of 16 gives a share at every second summary.

A layer is dead when the share is above `threshold_layer` in `for_summaries` consecutive summaries,
since a single batch may leave many units unused. One summary is enough when the share is above
`threshold_at_once`: a layer with no active unit passes nothing on. Layers whose output is NaN are
ignored.

In healthy trainings the share was 59 % at most, in the first step of eight layers with PyTorch's
own initial weights, and below 45 % from step 50 on; it was 100 % only with an injected fault.

The training process applies the limit of 1 % (SageMaker Debugger's `threshold_inactivity`), so it
is not a parameter of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.tensor_rows import Doubles, doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.streaks import Streaks


class DeadReluParams(Params):
    """Parameters of `dead_relu`."""

    threshold_layer: float = Field(default=50.0, ge=0, lt=100)
    """Share of a layer's units that must be dead. Unit: percent."""
    for_summaries: int = Field(default=3, ge=1)
    """Consecutive summaries of the activations. Unit: summaries."""
    threshold_at_once: float = Field(default=99.9, ge=0, le=100)
    """Share of dead units at which one summary is enough; 100 switches this off. Unit: percent."""


@dataclass(slots=True)
class _State(RowState):
    streaks: Streaks = field(default_factory=Streaks)
    worst: PointHistory = field(default_factory=PointHistory)


class DeadRelu(TensorRowRule[DeadReluParams, _State]):
    """One episode for the run; it names the first such layer in forward order."""

    meta = RuleMeta(
        name="dead_relu",
        version=1,
        family="numerical",
        meaning="Most units of a ReLU are never active.",
        severity="warning",
        available="maybe",
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
    columns = ("dead",)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        percent = 100 * doubles(table, "dead")
        known = np.isfinite(percent)
        if not known.any():
            return
        over = percent > params.threshold_layer
        length = state.streaks.update(table.rows, table.step, over, known)
        state.worst.append(table.step, percent[known].max())
        gone = percent > params.threshold_at_once
        high = (length >= params.for_summaries) | (gone & (length > 0))
        layers = np.flatnonzero(high & known).tolist()
        if layers:
            yield self._finding(table, percent, layers)
        elif high.any():
            yield Holds()
        else:
            yield Clear()

    def _finding(self, table: TensorFrame, percent: Doubles, layers: list[int]) -> Finding:
        first, limit = layers[0], self.params.threshold_layer
        since = int(self.state.streaks.since[first])
        return self.row_finding(
            table,
            layers,
            kind="layer",
            reason=f"{percent[first]:.0f} % of the units of {table.rows[first]} are dead since "
            f"step {since}",
            others=", and {} other layers",
            first_step=since,
            facts=(
                fact("dead", percent[first], limit=limit, unit="percent"),
                fact("summaries", self.state.streaks.length[first]),
            ),
            series=self.state.worst.series(
                "dead units of the worst layer", unit="percent", limit=limit
            ),
            explanation="a unit is dead if it was active in less than 1 % of a batch",
        )
