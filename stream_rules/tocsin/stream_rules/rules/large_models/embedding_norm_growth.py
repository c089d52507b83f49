"""`embedding_norm_growth`: rows of an embedding that outgrow the others, or the whole table.

The training process sends, every 100 steps or less often, the mean and the largest length of a
table's rows. By branch:

- `ratio`: the longest row is more than `ratio` times as long as the mean, in two summaries in a
  row.
- `growth`: the mean length is more than `factor` times what it was at half as many steps, in two
  summaries in a row. An embedding with small initial values grows a lot in healthy trainings, but
  not this fast: in twice the time, steps of equal size at most double the length, and steps in
  random directions increase it 1.4 times. Faster growth reinforces itself. The first 150 steps, in
  which a warm-up may do the same, are ignored.

In a GPT, an LSTM and a factorised matrix, the longest row was at most 7.5 times the mean, and after
the first 150 steps the mean length grew at most 1.4 times while the number of steps doubled.

An info: large logits and activations, which follow from it, have their own rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import Doubles, doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.layer_history import Flags, LayerHistory
from tocsin.stream_rules.signals.streaks import Streaks

_LASTING: Final = 2
_BEGINNING: Final = 150


class EmbeddingNormGrowthParams(Params):
    """Parameters of `embedding_norm_growth`."""

    ratio: float = Field(default=50.0, gt=1)
    """Largest ratio of the longest row to the mean row. Unit: a ratio."""
    factor: float = Field(default=3.0, gt=2)
    """Largest growth of the mean length while the number of steps doubles. Unit: a ratio."""


@dataclass(slots=True)
class _State(RowState):
    mean: LayerHistory = field(default_factory=LayerHistory)
    ratio: LayerHistory = field(default_factory=LayerHistory)
    streaks: dict[str, Streaks] = field(default_factory=dict)
    first: int | None = None


class EmbeddingNormGrowth(TensorRowRule[EmbeddingNormGrowthParams, _State]):
    """An episode for each branch; it names the worst table."""

    meta = RuleMeta(
        name="embedding_norm_growth",
        version=1,
        family="large_models",
        meaning="The rows of an embedding grow faster than normal training explains, or one row "
        "outgrows all others.",
        severity="info",
        available="maybe",
        inputs=(tensors("embeddings"),),
        capture_hint="tables of torch.nn.Embedding and EmbeddingBag are captured with the "
        "collection activations",
        remedy="Give the embedding weight decay or a lower learning rate, clip gradients, and "
        "check the token of the longest row.",
        branches={
            "ratio": "One row is many times as long as the mean.",
            "growth": "The mean length grows faster than the number of steps.",
        },
        does_not_see="Growth by a constant step, however large: `weight_update_ratio` sees that; "
        "what happened before the first summary.",
        params=EmbeddingNormGrowthParams,
        resolve_after_steps=0,
    )
    state_type = _State
    columns = ("row_norm_mean", "row_norm_max")

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, params, lengths = self.state, self.params, doubles(table, "row_norm_mean")
        with np.errstate(all="ignore"):
            ratios = np.where(lengths > 0, doubles(table, "row_norm_max") / lengths, np.nan)
        state.first = table.step if state.first is None else state.first
        state.mean.add(table.step, table.rows, lengths)
        state.ratio.add(table.step, table.rows, ratios)
        before = self._before(table.step)
        with np.errstate(all="ignore"):
            uneven = ratios > params.ratio
            growing = lengths > params.factor * before
        yield from self._branch("ratio", uneven, table, ratios, before)
        yield from self._branch("growth", growing, table, lengths, before)

    def _before(self, step: int) -> Doubles:
        """The mean lengths at half as many steps of this run, or a little later, so that nothing
        has doubled since; NaN while that is too early."""
        history = self.state.mean
        begun = self.state.first or 0
        found = history.first_since(begun + (step - begun) // 2)
        if found is None or step - begun < _BEGINNING:
            return np.full(len(history.rows), np.nan)
        return found

    def _branch(
        self, branch: str, bad: Flags, table: TensorFrame, worth: Doubles, before: Doubles
    ) -> Outcomes:
        streaks = self.state.streaks.setdefault(branch, Streaks())
        length = streaks.update(table.rows, table.step, bad)
        found = np.flatnonzero(length >= _LASTING).tolist()
        if not found:
            yield Clear(table.step, about=branch)
            return
        found.sort(key=lambda i: -worth[i])
        yield self._finding(branch, table, found, before)

    def _finding(
        self, branch: str, table: TensorFrame, found: list[int], before: Doubles
    ) -> Finding:
        state, params, i = self.state, self.params, found[0]
        name = table.rows[i]
        mean, ratio = float(state.mean.values[-1, i]), float(state.ratio.values[-1, i])
        row = table.count("row_of_max")
        if branch == "ratio":
            which = "" if row is None else f" ({int(row[i])})"
            reason = f"the longest row{which} of {name} is {ratio:.3g} times as long as the mean"
            series = state.ratio.series(i, "longest row against the mean", limit=params.ratio)
        else:
            reason = (
                f"the mean length of the rows of {name} has grown from {before[i]:.3g} to "
                f"{mean:.3g} since half as many steps"
            )
            limit = params.factor * float(before[i])
            series = state.mean.series(i, "mean length of the rows", limit=limit)
        return self.row_finding(
            table,
            found,
            kind="layer",
            branch=branch,
            reason=reason,
            others=", and {} other tables",
            first_step=int(state.streaks[branch].since[i]),
            facts=(
                fact("mean_length", mean),
                fact("longest_to_mean", ratio, limit=params.ratio),
                *([] if row is None else [fact("longest_row", row[i])]),
            ),
            series=series,
        )
