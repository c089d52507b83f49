"""`all_zero`: numbers that should not be are zero.

- gradients: checked by default. All gradients of the model together are exactly zero in
  `for_summaries` consecutive checks (a check is an exact norm of a step, or a summary), so the
  model does not learn: the loss does not depend on the weights, all units are dead, or gradients
  are set to zero between backward() and step(). A solved task has no gradients either, so this
  check pauses while the loss is zero, or below 1 % of the first one.
- tensors: the tensors in `tensors` contain at least `threshold` percent zeros, in `for_summaries`
  consecutive summaries, whatever the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries
from tocsin.stream_rules.reading.tensor_rows import (
    rows_asked_for,
)
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.streaks import Streaks

GRADIENTS, TENSORS = "gradients", "tensors"
_SOLVED: Final = 0.01


class AllZeroParams(Params):
    """Parameters of `all_zero`."""

    tensors: tuple[str, ...] = Field(default=(), strict=False)
    """Tensors to watch, as COLLECTION/NAME; `*` and `?` stand for any characters."""
    threshold: float = Field(default=100.0, gt=0, le=100)
    """Share of zeros in such a tensor that counts. Unit: percent."""
    for_summaries: int = Field(default=3, ge=1)
    """How many consecutive checks. Unit: summaries."""


@dataclass(slots=True)
class _State(RowState):
    norms: RankSeries = field(default_factory=RankSeries)
    first_loss: float | None = None
    loss: float | None = None
    zero_steps: list[int] = field(default_factory=list)
    since: int = 0
    since_ms: int = 0
    streaks: dict[str, Streaks] = field(default_factory=dict)


class AllZero(TensorRowRule[AllZeroParams, _State]):
    """Without `tensors` it watches the gradients of the model as a whole."""

    meta = RuleMeta(
        name="all_zero",
        version=1,
        family="numerical",
        meaning="All gradients of the model, or all values of a named tensor, are zero.",
        severity="warning",
        available="maybe",
        inputs=(tensors("*"), scalar("gradient_norm"), scalar("loss", optional=True)),
        capture_hint="gradients are captured when an optimizer of PyTorch steps; for other tensors "
        "switch their collection on",
        remedy="Look for a detach() or no_grad between weights and loss, for zero_grad() between "
        "backward() and step(), for weights that were all set to zero, and for dead units.",
        does_not_see="Gradients that are None: an optimizer skips those. Tensors with some "
        "non-zero values, unless `threshold` is lower.",
        branches={
            GRADIENTS: "All gradients of the model are zero, while the loss is not.",
            TENSORS: "A tensor that the configuration names is zero.",
        },
        alias="AllZero",
        params=AllZeroParams,
        presets={"sagemaker": {"threshold": 100.0, "for_summaries": 1}},
        resolve_after_steps=20,
    )
    state_type = _State
    columns = ("numel", "zeros")

    def table_key(self, frame: TensorFrame) -> str:
        # Of activations a step has one frame for each set of columns.
        return f"{frame.collection}|{','.join(frame.columns)}"

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        if state.norms.overtaken_by(frame):
            self.state = state = _State(norms=state.norms)
        if not state.norms.accepts(frame):
            return
        losses, norms = frame.column("loss"), frame.column("gradient_norm")
        for i, step in enumerate(frame.steps.tolist()):
            if losses is not None and np.isfinite(losses[i]):
                state.loss = float(losses[i])
                if state.first_loss is None:
                    state.first_loss = state.loss
            if norms is not None and state.norms.add(step, float(norms[i])):
                yield from self._inspect(step, zero=norms[i] == 0, at=at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        numel, zeros = frame.count("numel"), frame.count("zeros")
        if numel is None or zeros is None or not len(frame.rows):
            return
        if frame.collection == GRADIENTS and frame.origin.rank == (self.state.norms.rank or 0):
            total = int(numel.sum())
            if frame.parts == 1 and total:
                yield from self._inspect(frame.step, zero=int(zeros.sum()) == total, at=at)
        if self.params.tensors:
            yield from super().on_tensors(frame, at)

    def _inspect(self, step: int, *, zero: bool, at: Moment) -> Outcomes:
        """Norm and summary of one step are one look."""
        state = self.state
        if not zero or self._solved():
            state.zero_steps = []
            yield Clear(step, about=GRADIENTS)
            return
        if not state.zero_steps:
            state.since, state.since_ms = step, at.now_ms
        if step not in state.zero_steps:
            state.zero_steps = [*state.zero_steps, step][-self.params.for_summaries :]
        if len(state.zero_steps) == self.params.for_summaries and state.zero_steps[-1] == step:
            loss = "" if state.loss is None else f", and the loss is {state.loss:.4g}"
            yield Finding(
                about=GRADIENTS,
                branch=GRADIENTS,
                subject=Subject(kind="scalar", name="gradient_norm"),
                reason=f"all gradients of the model are zero since step {state.since}{loss}",
                first_step=state.since,
                first_rank=state.norms.rank,
                onset_ms=state.since_ms,
                facts=(
                    fact("gradient_norm", 0.0),
                    *(() if state.loss is None else (fact("loss", state.loss),)),
                ),
                series=state.norms.series("gradient norm") if state.norms.steps else None,
            )

    def _solved(self) -> bool:
        loss, first = self.state.loss, self.state.first_loss
        return loss is not None and first is not None and abs(loss) <= _SOLVED * abs(first)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        params, key = self.params, self.table_key(table)
        numel, zeros = table.count("numel"), table.count("zeros")
        assert numel is not None
        assert zeros is not None
        percent = 100 * zeros / np.maximum(numel, 1)
        holds = (percent >= params.threshold) & (numel > 0) & rows_asked_for(table, params.tensors)
        streaks = self.state.streaks.setdefault(key, Streaks())
        length = streaks.update(table.rows, table.step, holds)
        found = np.flatnonzero(length >= params.for_summaries).tolist()
        about = f"{TENSORS}/{key}"
        if not found:
            yield Clear(table.step, about=about)
            return
        first, since = found[0], int(streaks.since[found[0]])
        yield self.row_finding(
            table,
            found,
            about=about,
            branch=TENSORS,
            reason=f"{percent[first]:.0f} % of {table.collection}/{table.rows[first]} are zero "
            f"since step {since}",
            others=", and {} other tensors",
            first_step=since,
            facts=(
                fact("zeros", percent[first], limit=params.threshold, unit="percent"),
                fact("summaries", length[first]),
            ),
        )
