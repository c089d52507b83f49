"""`attention_logit_growth`: attention logits that grow until attention sees only one position.

At the steps of its capture schedule, the training process recomputes the attention logits of some
heads and queries of one sample, and sends the largest logit (`logit_max`) and the entropy of the
probabilities, as a share of the largest possible entropy. Three conditions on a layer, by branch:

- `limit`: the largest logit is above `limit` in two summaries in a row, or once above `factor`
  times that. A softmax over logits that far apart selects one position and has no gradient. With a
  scale of 1/sqrt(width) healthy trainings stay below about 50 (small GPTs: at most 43, and 2,212 at
  thirty times the best learning rate); those that diverged had thousands (Wortsman et al.,
  "Small-scale proxies for large-scale Transformer training instabilities", 2023), and Kimi K2 clips
  at 100.
- `growth`: the largest logit is above `limit` / `factor`, has risen in each of the last three
  summaries, and is more than `factor` times its value of at most `window` steps ago: at this rate
  it reaches the limit within another `window` steps. Every training starts with small logits that
  grow, so the rule ignores them until they are half-way to the limit. An info.
- `entropy_collapse`: the entropy is below `least_entropy_percent` of the largest possible one in
  two summaries in a row, and less than a tenth of its highest (Zhai et al., "Stabilizing
  Transformer training by preventing attention entropy collapse", 2023). Copying tasks also produce
  such heads, so this alone is an info.

If no logit was sampled, the rule uses their bound from the longest query and key (`qk_bound`).
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
_FALL: Final = 10.0


class AttentionLogitGrowthParams(Params):
    """Parameters of `attention_logit_growth`."""

    limit: float = Field(default=100.0, gt=0)
    """The largest logit that is not an issue. Unit: that of the logits, after scaling."""
    factor: float = Field(default=2.0, gt=1)
    """Growth within the window; also the multiple of the limit that is an issue at once. Unit: a
    ratio."""
    window: int = Field(default=1000, ge=1)
    """Number of steps for that growth. Unit: steps."""
    least_entropy_percent: float = Field(default=1.0, ge=0, le=100)
    """Smallest entropy of the attention. Unit: percent of the largest possible."""


@dataclass(slots=True)
class _State(RowState):
    levels: LayerHistory = field(default_factory=LayerHistory)
    shares: LayerHistory = field(default_factory=LayerHistory)
    streaks: dict[str, Streaks] = field(default_factory=dict)


class AttentionLogitGrowth(TensorRowRule[AttentionLogitGrowthParams, _State]):
    """An episode for each branch; it names the worst layer."""

    meta = RuleMeta(
        name="attention_logit_growth",
        version=1,
        family="large_models",
        meaning="The logits of an attention layer have grown so much that it sees only one "
        "position.",
        severity="warning",
        available="maybe",
        inputs=(tensors("attention"),),
        capture_hint="attention is captured where scaled_dot_product_attention or "
        "torch.nn.MultiheadAttention is called, with the collection activations",
        remedy="Lower the learning rate or warm up for longer; normalise queries and keys "
        "(QK-norm), or cap the logits.",
        branches={
            "limit": "The largest attention logit is above the limit.",
            "growth": "The largest attention logit is half-way to the limit and grows fast.",
            "entropy_collapse": "Attention is concentrated on almost a single position.",
        },
        does_not_see="Attention that is written by hand (a matrix product and a softmax); heads "
        "and queries that are not in the sample.",
        params=AttentionLogitGrowthParams,
        resolve_after_steps=0,
    )
    state_type = _State
    columns = ("qk_bound",)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, level = self.state, doubles(table, "qk_bound")
        largest = table.column("logit_max")
        if largest is not None:
            level = np.where(np.isfinite(largest), largest, level)
        state.levels.add(table.step, table.rows, level)
        with np.errstate(invalid="ignore"):
            high = level > self.params.limit
        yield from self._branch("limit", high, self._over_limit(), table, level)
        growing = self._growing(table.step)
        yield from self._branch("growth", growing, growing, table, level)
        if "entropy_share" in table.columns:
            percent = 100 * doubles(table, "entropy_share")
            state.shares.add(table.step, table.rows, percent)
            with np.errstate(invalid="ignore"):
                low = percent < self.params.least_entropy_percent
            yield from self._branch("entropy_collapse", low, self._collapsed(), table, -percent)

    def _over_limit(self) -> Flags:
        values, params = self.state.levels.values, self.params
        with np.errstate(invalid="ignore"):
            high = values > params.limit
            far = values[-1] > params.factor * params.limit
        return np.asarray(far | (high[-_LASTING:].all(0) & (len(values) >= _LASTING)))

    def _growing(self, step: int) -> Flags:
        values, params = self.state.levels.values, self.params
        then = self.state.levels.first_since(step - params.window)
        if then is None or len(values) <= _LASTING:
            return np.zeros(values.shape[1], bool)
        last = values[-1 - _LASTING :]
        with np.errstate(invalid="ignore"):
            rising = (np.diff(last, axis=0) > 0).all(0)
            high = last[-1] > params.limit / params.factor
            return np.asarray(rising & high & (last[-1] > params.factor * then))

    def _collapsed(self) -> Flags:
        values = self.state.shares.values
        with np.errstate(invalid="ignore"):
            low = values < self.params.least_entropy_percent
            fallen = _FALL * values[-1] < np.nanmax(np.nan_to_num(values), axis=0)
        return np.asarray(low[-_LASTING:].all(0) & (len(values) >= _LASTING) & fallen)

    def _branch(
        self, branch: str, begun: Flags, bad: Flags, table: TensorFrame, worth: Doubles
    ) -> Outcomes:
        """`begun` are the layers that are where they should not be, `bad` those long enough."""
        streaks = self.state.streaks.setdefault(branch, Streaks())
        streaks.update(table.rows, table.step, begun)
        found = np.flatnonzero(bad).tolist()
        if not found:
            yield Clear(table.step, about=branch)
            return
        found.sort(key=lambda i: -worth[i])
        yield self._finding(branch, table, found)

    def _finding(self, branch: str, table: TensorFrame, found: list[int]) -> Finding:
        state, params, first = self.state, self.params, found[0]
        levels, least = state.levels, params.least_entropy_percent
        name, level = levels.rows[first], float(levels.values[-1, first])
        series = levels.series(first, "largest attention logit", limit=params.limit)
        if branch == "limit":
            reason = (
                f"the largest attention logit of {name} is {level:.4g}, above {params.limit:.4g}"
            )
        elif branch == "growth":
            then = levels.first_since(levels.steps[-1] - params.window)
            before = float(then[first]) if then is not None else level
            reason = (
                f"the largest attention logit of {name} has grown from {before:.3g} to "
                f"{level:.4g} in {min(params.window, levels.steps[-1] - levels.steps[0])} steps"
            )
        else:
            percent = float(state.shares.values[-1, first])
            series = state.shares.series(
                first, "entropy of the attention", unit="percent", limit=least
            )
            reason = (
                f"the attention of {name} sees one position: its entropy is {percent:.2g} % of the "
                "largest possible"
            )
        entropies = dict(zip(state.shares.rows, state.shares.values[-1:].ravel(), strict=False))
        entropy = entropies.get(name)
        return self.row_finding(
            table,
            found,
            kind="layer",
            branch=branch,
            reason=reason,
            others=", and so do {} other layers",
            first_step=int(state.streaks[branch].since[first]),
            severity="warning" if branch == "limit" else "info",
            facts=(
                fact("largest_logit", level, limit=params.limit),
                *(
                    []
                    if entropy is None
                    else [fact("entropy", entropy, limit=least, unit="percent")]
                ),
            ),
            series=series,
        )
