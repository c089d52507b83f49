"""`embedding_norm_growth`: rows of an embedding that outgrow the others, or the whole table.

The training process sends, every 100 steps or less often, the mean and the largest length of a
table's rows. By branch:

- `ratio`: the longest row is more than `ratio` times as long as the mean, in two summaries in a
  row.
- `growth`: the mean length is more than `factor` times what it was at half as many steps, in two
  summaries in a row. An embedding with small initial values grows a lot in healthy trainings, but
  not this fast: steps of an even size add up to twice the length in twice the time at most, and
  random ones to 1.4 times. More is a growth that feeds itself. The first 150 steps, in which a
  warm-up may do the same, are ignored.

Of a GPT, an LSTM and a factorised matrix the longest row was 7.5 times the mean at most, and the
mean length grew by 1.4 times at most while the steps doubled, after the first 150.

An info: it leads to large logits and activations, which have their own rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Series, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows, aligned, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors
from tocsin.stream_rules.signals.layer_history import Flags, LayerHistory

_LASTING: Final = 2
_BEGINNING: Final = 150


class EmbeddingNormGrowthParams(Params):
    """Parameters of `embedding_norm_growth`."""

    ratio: float = Field(default=50.0, gt=1)
    """Largest ratio of the longest row to the mean row. Unit: a ratio."""
    factor: float = Field(default=3.0, gt=2)
    """Largest growth of the mean length while the number of steps doubles. Unit: a ratio."""


@dataclass(slots=True)
class _State:
    frames: LowestRankRows = field(default_factory=LowestRankRows)
    mean: LayerHistory = field(default_factory=LayerHistory)
    ratio: LayerHistory = field(default_factory=LayerHistory)
    rows: list[str] = field(default_factory=list)
    streaks: dict[str, StateArray] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    first: int | None = None


class EmbeddingNormGrowth(Rule[EmbeddingNormGrowthParams, _State]):
    """An episode for each branch; it names the worst table."""

    meta = RuleMeta(
        name="embedding_norm_growth",
        version=1,
        family="large_models",
        meaning="The rows of an embedding grow faster than normal training explains, or one row "
        "outgrows all others.",
        severity="info",
        comes="maybe",
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
    by_part = True

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        whole = state.frames.assemble(frame)
        mean = None if whole is None else whole.column("row_norm_mean")
        largest = None if whole is None else whole.column("row_norm_max")
        if whole is None or mean is None or largest is None or not len(whole.rows):
            return
        lengths = mean.astype(np.float64)
        with np.errstate(all="ignore"):
            ratios = np.where(lengths > 0, largest.astype(np.float64) / lengths, np.nan)
        state.first = whole.step if state.first is None else state.first
        state.mean.add(whole.step, whole.rows, lengths)
        state.ratio.add(whole.step, whole.rows, ratios)
        before = self._before(whole.step)
        with np.errstate(all="ignore"):
            uneven = ratios > params.ratio
            growing = lengths > params.factor * before
        yield from self._branch("ratio", uneven, whole, ratios, before)
        yield from self._branch("growth", growing, whole, lengths, before)
        state.rows = list(whole.rows)

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
        self, branch: str, bad: Flags, frame: TensorFrame, worth: Doubles, before: Doubles
    ) -> Outcomes:
        state = self.state
        streak = state.streaks.get(branch, np.zeros(0))
        streak = np.nan_to_num(aligned(frame.rows, state.rows, streak))
        state.streaks[branch] = np.where(bad, streak + 1, 0.0)
        found = [int(i) for i in np.flatnonzero(state.streaks[branch] >= _LASTING)]
        if not found:
            state.since.pop(branch, None)
            yield Clear(frame.step, about=branch)
            return
        found.sort(key=lambda i: -worth[i])
        state.since.setdefault(branch, frame.step)
        yield self._finding(branch, frame, found, before)

    def _finding(
        self, branch: str, frame: TensorFrame, found: list[int], before: Doubles
    ) -> Finding:
        state, params, i = self.state, self.params, found[0]
        name = frame.rows[i]
        mean, ratio = float(state.mean.values[-1, i]), float(state.ratio.values[-1, i])
        row = frame.count("row_of_max")
        which = "" if row is None else f" ({int(row[i])})"
        if branch == "ratio":
            said = f"the longest row{which} of {name} is {ratio:.3g} times as long as the mean"
            history, limit, series = state.ratio, params.ratio, "longest row against the mean"
        else:
            said = (
                f"the mean length of the rows of {name} has grown from {before[i]:.3g} to "
                f"{mean:.3g} since half as many steps"
            )
            limit = params.factor * float(before[i])
            history, series = state.mean, "mean length of the rows"
        steps, values = history.of(i)
        others = f", and {len(found) - 1} other tables" if len(found) > 1 else ""
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="layer", name=name, collection="embeddings"),
            reason=said + others,
            first_step=state.since[branch],
            first_rank=state.frames.rank,
            evidence=Evidence(
                facts=(
                    fact("mean_length", mean),
                    fact("longest_to_mean", ratio, limit=params.ratio),
                    *(fact("longest_row", r) for r in ([] if row is None else [row[i]])),
                ),
                series=Series(name=series, steps=steps, values=values, limit=limit),
                followed=len(found) - 1,
                also=named(frame.rows, found[1:]),
            ),
        )
