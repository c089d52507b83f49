"""`logit_drift`: the output logits of a cross-entropy drift together.

A cross-entropy ignores a constant that is added to all logits of a token: nothing fixes their
level, and in half precision large logits lose the small differences that matter. The training
process sends the log of the sum of their exponentials, log Z, averaged over a sample of tokens.
Fine-tuned models may start at any level (GPT-2 is below -30), so the drift is measured from the
first summary. By branch:

- `limit`: log Z is further than `limit` from its start, in two summaries in a row.
- `slope`: log Z has moved by more than `slope` per 1,000 steps, measured between the first and the
  last third of the last `window` steps, over at least 500 steps and five summaries, and always in
  the same direction; and it is at least `slope` from its start.

In small language models, log Z went from 4.8 to at most 7.6 in 1,000 healthy steps. It also rises
in a classifier that becomes more confident. So this is an info, unless the drift exceeds ten times
the limit. PaLM and others keep log Z near 0 with an auxiliary loss (z-loss, 1e-4 log²Z). Outputs
without a cross-entropy (no labels or tokens were captured) are not logits, and are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.outcomes import Clear, Moment, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import Doubles, aligned, doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.layer_history import Flags, LayerHistory
from tocsin.stream_rules.signals.streaks import Streaks

_LASTING: Final = 2
_FEWEST: Final = 5
_SHORTEST: Final = 500
_FAR: Final = 10.0


class LogitDriftParams(Params):
    """Parameters of `logit_drift`."""

    limit: float = Field(default=20.0, gt=0)
    """Largest distance of the mean log Z from its initial value. Unit: nats."""
    slope: float = Field(default=5.0, gt=0)
    """Largest drift. Unit: nats per 1,000 steps."""
    window: int = Field(default=2000, ge=_SHORTEST)
    """Number of steps over which the drift is measured. Unit: steps."""


@dataclass(slots=True)
class _State(RowState):
    history: LayerHistory = field(default_factory=LayerHistory)
    first_rows: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cross_entropy: bool = False
    streaks: dict[str, Streaks] = field(default_factory=dict)


class LogitDrift(TensorRowRule[LogitDriftParams, _State]):
    """An episode for each branch."""

    meta = RuleMeta(
        name="logit_drift",
        version=1,
        family="large_models",
        meaning="The level of the output logits drifts away from its initial value.",
        severity="info",
        available="maybe",
        inputs=(
            tensors("logits"),
            tensors("labels", optional=True),
            tensors("tokens", optional=True),
        ),
        capture_hint="the output layer is the one that shares its weight with an embedding, or the "
        "widest and last Linear; with the collection activations",
        remedy="Add a z-loss (1e-4 times the square of log Z), lower the learning rate, and remove "
        "the bias of the last layer.",
        branches={
            "limit": "The mean log Z is far from its initial value.",
            "slope": "The mean log Z moves steadily and fast.",
        },
        does_not_see="A head that is not a torch.nn.Linear; a level that was wrong from the start; "
        "a drift that ended before the first summary.",
        params=LogitDriftParams,
        resolve_after_steps=0,
    )
    state_type = _State
    columns = ("log_z",)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if frame.collection != "logits":
            self.state.cross_entropy = True
            return ()
        return super().on_tensors(frame, at)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, level = self.state, doubles(table, "log_z")
        start = aligned(table.rows, state.first_rows, np.asarray(state.first))
        start = np.where(np.isfinite(start), start, level)
        state.first_rows, state.first = list(table.rows), start.tolist()
        state.history.add(table.step, table.rows, level)
        if not state.cross_entropy:
            return
        away = np.abs(state.history.values - start)
        with np.errstate(invalid="ignore"):
            over = away > self.params.limit
        far = np.asarray(over[-_LASTING:].all(0) & (len(away) >= _LASTING))
        slopes = self._slopes(table.step)
        steep = (np.abs(slopes) > self.params.slope) & (away[-1] > self.params.slope)
        steep &= ~far
        yield from self._branch("limit", over[-1], far, table, start, slopes)
        yield from self._branch("slope", steep, steep, table, start, slopes)

    def _slopes(self, step: int) -> Doubles:
        """Per 1,000 steps; 0 where it is not known, or not always in one direction."""
        history = self.state.history
        steps = np.asarray(history.steps, np.float64)
        inside = steps >= step - self.params.window
        values, steps = history.values[inside], steps[inside]
        none = np.zeros(values.shape[1])
        if len(steps) < _FEWEST or steps[-1] - steps[0] < _SHORTEST:
            return none
        third = max(1, len(steps) // 3)
        middle = slice(third, -third)
        low, high = np.median(values[:third], axis=0), np.median(values[-third:], axis=0)
        between = np.median(values[middle], axis=0) if len(steps[middle]) else (low + high) / 2
        away = float(np.median(steps[-third:]) - np.median(steps[:third]))
        steady = (between - low) * (high - between) > 0
        # Most of the way in the first part is a beginning that is over.
        steady &= np.abs(high - between) > np.abs(high - low) / 3
        return np.where(steady, 1000 * (high - low) / away, none)

    def _branch(
        self,
        branch: str,
        begun: Flags,
        bad: Flags,
        table: TensorFrame,
        start: Doubles,
        slopes: Doubles,
    ) -> Outcomes:
        """`begun` are the outputs that are where they should not be, `bad` those long enough."""
        state, params = self.state, self.params
        streaks = state.streaks.setdefault(branch, Streaks())
        streaks.update(table.rows, table.step, begun)
        if not bad.any():
            yield Clear(table.step, about=branch)
            return
        i = int(np.argmax(bad))
        level = float(state.history.values[-1, i])
        away, slope = level - float(start[i]), float(slopes[i])
        slope_text = f", by {slope:+.3g} per 1,000 steps" if branch == "slope" else ""
        yield self.row_finding(
            table,
            [i],
            kind="layer",
            branch=branch,
            reason=f"the mean log Z of the logits of {table.rows[i]} has drifted from "
            f"{start[i]:.3g} to {level:.4g}{slope_text}",
            first_step=int(streaks.since[i]),
            severity="warning" if abs(away) > _FAR * params.limit else None,
            facts=(
                fact("log_z", level),
                fact("drift", away, limit=params.limit),
                fact("slope", slope, limit=params.slope, unit="per 1,000 steps"),
            ),
            series=state.history.series(i, "mean log Z"),
        )
