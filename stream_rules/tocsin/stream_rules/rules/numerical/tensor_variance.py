"""`tensor_variance`: the variance of a named tensor is outside the configured limits.

The variance is the square of the summary's standard deviation, over the tensor's finite values (for
an activation, over a sample of them). The usual variance differs from tensor to tensor, so the rule
has no default limits and runs only if the configuration names tensors and a limit. The rule fires
after `for_summaries` consecutive summaries outside the limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.outcomes import Clear, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import doubles, rows_asked_for
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.streaks import Streaks

LOW, HIGH = "below", "above"


class TensorVarianceParams(Params):
    """Parameters of `tensor_variance`. It needs one of the two limits."""

    tensors: tuple[str, ...] = Field(default=("*",), strict=False)
    """Tensors to watch, as COLLECTION/NAME; `*` and `?` stand for any characters."""
    min_threshold: float | None = Field(default=None, ge=0)
    """Lower limit of the variance."""
    max_threshold: float | None = Field(default=None, ge=0)
    """Upper limit of the variance."""
    for_summaries: int = Field(default=1, ge=1)
    """How many consecutive summaries. Unit: summaries."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.min_threshold, self.max_threshold
        if low is not None and high is not None and low > high:
            raise ValueError("expected a min_threshold that is not above the max_threshold")
        return self


@dataclass(slots=True)
class _State(RowState):
    streaks: dict[str, Streaks] = field(default_factory=dict)


class TensorVariance(TensorRowRule[TensorVarianceParams, _State]):
    """Off until the configuration sets tensors and a limit."""

    meta = RuleMeta(
        name="tensor_variance",
        version=1,
        family="numerical",
        meaning="The variance of a tensor is outside the configured limits.",
        severity="warning",
        available="maybe",
        by_default=False,
        inputs=(tensors("*"),),
        capture_hint="the tensors' collection must be captured, with the column std",
        remedy="Check how the tensor is computed; a variance of almost zero means that it is "
        "constant.",
        does_not_see="Tensors without a limit: the rule does not know which variance is correct.",
        branches={
            LOW: "The variance is below `min_threshold`.",
            HIGH: "The variance is above `max_threshold`.",
        },
        alias="TensorVariance",
        params=TensorVarianceParams,
        presets={"sagemaker": {}},
        resolve_after_steps=0,
    )
    state_type = _State
    columns = ("std",)

    def table_key(self, frame: TensorFrame) -> str:
        # Of activations a step has one frame for each set of columns.
        return f"{frame.collection}|{','.join(frame.columns)}"

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        params, key = self.params, self.table_key(table)
        variance = np.square(doubles(table, "std"))
        asked = rows_asked_for(table, params.tensors)
        known = np.isfinite(variance)
        for branch, limit in ((LOW, params.min_threshold), (HIGH, params.max_threshold)):
            if limit is None:
                continue
            about = f"{branch}/{key}"
            out = (variance < limit) if branch == LOW else (variance > limit)
            streaks = self.state.streaks.setdefault(about, Streaks())
            length = streaks.update(table.rows, table.step, out & asked, known)
            high = length >= params.for_summaries
            found = np.flatnonzero(high & known).tolist()
            if not found:
                yield Holds(table.step, about) if high.any() else Clear(table.step, about)
                continue
            first, since = found[0], int(streaks.since[found[0]])
            yield self.row_finding(
                table,
                found,
                about=about,
                branch=branch,
                reason=f"the variance of {table.collection}/{table.rows[first]} is "
                f"{variance[first]:.3g}, {branch} {limit:.3g}, since step {since}",
                others=", and {} other tensors are out",
                first_step=since,
                facts=(fact("variance", variance[first], limit=limit),),
            )
