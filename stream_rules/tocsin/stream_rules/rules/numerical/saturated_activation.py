"""`saturated_activation`: a tanh, sigmoid or softmax operates in its flat range and passes on no
gradient.

The training process sends, for each module that is a tanh or a sigmoid, the share of a sample of
16,384 inputs at which its derivative is below 1e-7: beyond ±8.752 for tanh, where 1 - tanh² is that
small, and beyond ±16.118 for sigmoid, where s (1 - s) is. For their hard forms it sends the share
of outputs at a bound, and for a softmax the share of rows whose largest probability is above 0.999.
A layer is saturated when the share is above `threshold_layer` in the first summary of a run, before
any learning, or in `for_summaries` consecutive ones. (SageMaker Debugger's limits, ±9.4999 for tanh
and -23 and 16.99999 for sigmoid, correspond to derivatives of 2e-8, 1e-10 and 4e-8.)

Two cases are an info, not a warning: a softmax with confident predictions, and the last module of
the model after it has learned to saturate (for the black pixels of a decoder, for example). Both
may be correct.

In healthy trainings of perceptrons, convolutions and autoencoders with tanh or sigmoid the share
was 0 in each layer at steps 1 and 100; with weights of a standard deviation of 1 in place of 0.1 it
was 0.26 to 0.28 (six tanh layers of 64 units), of 5 it was 0.8. The default is therefore 20 %; 50 %
is a common choice elsewhere.
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

HIDDEN, OUTPUT, SOFTMAX = "hidden", "output", "softmax"


class SaturatedActivationParams(Params):
    """Parameters of `saturated_activation`."""

    threshold_layer: float = Field(default=20.0, ge=0, lt=100)
    """Share of a layer that must be saturated. Unit: percent."""
    for_summaries: int = Field(default=2, ge=1)
    """Consecutive summaries of the activations, after the first one. Unit: summaries."""


@dataclass(slots=True)
class _Kind:
    streaks: Streaks = field(default_factory=Streaks)
    first_step: int | None = None
    worst: PointHistory = field(default_factory=PointHistory)


@dataclass(slots=True)
class _State(RowState):
    kinds: dict[str, _Kind] = field(default_factory=dict)
    last_order: int = -1


class SaturatedActivation(TensorRowRule[SaturatedActivationParams, _State]):
    """One episode for each branch; it names the first such layer in forward order."""

    meta = RuleMeta(
        name="saturated_activation",
        version=1,
        family="numerical",
        meaning="Most of a tanh, sigmoid or softmax layer is saturated: its gradient is almost "
        "zero.",
        severity="warning",
        available="maybe",
        inputs=(tensors("activations"),),
        capture_hint="activations of torch.nn.Tanh, Sigmoid, Hardtanh, Hardsigmoid and Softmax are "
        "captured (for a compiled model, if capture started before its first call); calls of "
        "torch.tanh, torch.sigmoid and torch.softmax are not seen",
        remedy="Use smaller initial weights (Xavier), normalise the inputs or add a normalisation "
        "layer before it, and lower the learning rate.",
        does_not_see="Functions (torch.tanh), the gates inside of nn.LSTM and nn.GRU, and layers "
        "that are nearly flat: the limit is a derivative of 1e-7. This limit belongs to the "
        "training process and is not a parameter.",
        alias="SaturatedActivation",
        params=SaturatedActivationParams,
        branches={
            "hidden": "A layer within the model.",
            "output": "The last module of the model. An info.",
            "softmax": "A softmax that is sure of its answers. An info.",
        },
        presets={"sagemaker": {"threshold_layer": 50.0, "for_summaries": 1}},
        resolve_after_steps=0,
    )
    state_type = _State
    columns = ("saturated",)

    def table_key(self, frame: TensorFrame) -> str:
        return SOFTMAX if "entropy" in frame.columns else HIDDEN

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        # A step has one frame for each set of columns; the last module may be in any of them.
        order = frame.count("order")
        if order is not None and order.size and frame.columns:
            self.state.last_order = max(self.state.last_order, int(order.max()))
        return super().on_tensors(frame, at)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        params, which = self.params, self.table_key(table)
        percent = 100 * doubles(table, "saturated")
        known = np.isfinite(percent)
        if not known.any():
            return
        kind = self.state.kinds.setdefault(which, _Kind())
        fresh = kind.first_step is None
        if kind.first_step is None:
            kind.first_step = table.step
        kind.worst.append(table.step, percent[known].max())
        length = kind.streaks.update(
            table.rows, table.step, percent > params.threshold_layer, known
        )
        from_first = kind.streaks.since == kind.first_step
        high = (length >= params.for_summaries) | (from_first & (length > 0))
        branches = {SOFTMAX: high}
        if which != SOFTMAX:
            output = np.zeros(len(table.rows), bool)
            order = table.count("order")
            if order is not None:
                output = (order >= max(self.state.last_order, 1)) & ~from_first
            branches = {HIDDEN: high & ~output, OUTPUT: high & output}
        for branch, among in branches.items():
            layers = np.flatnonzero(among & known).tolist()
            if layers:
                yield self._finding(branch, kind, table, percent, layers)
            elif among.any():
                yield Holds(about=branch)
            elif not fresh:
                yield Clear(about=branch)

    def _finding(
        self, branch: str, kind: _Kind, table: TensorFrame, percent: Doubles, layers: list[int]
    ) -> Finding:
        first, limit = layers[0], self.params.threshold_layer
        since = int(kind.streaks.since[first])
        what = "rows have one answer above 0.999" if branch == SOFTMAX else "values are saturated"
        return self.row_finding(
            table,
            layers,
            kind="layer",
            branch=branch,
            severity=None if branch == HIDDEN else "info",
            reason=f"{percent[first]:.0f} % of the {what} in {table.rows[first]} since step "
            f"{since}",
            others=", and {} other layers",
            first_step=since,
            facts=(
                fact("saturated", percent[first], limit=limit, unit="percent"),
                fact("summaries", kind.streaks.length[first]),
            ),
            series=kind.worst.series(
                "saturated part of the worst layer", unit="percent", limit=limit
            ),
            explanation={
                HIDDEN: "the derivative at these values is below 1e-7, or they are at a bound",
                OUTPUT: "it is the last module in forward order, and learned to saturate: that "
                "may be its task",
                SOFTMAX: "if these are the model's answers, it may be correct",
            }[branch],
        )
