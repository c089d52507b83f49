"""`attention_logit_growth`: attention logits that grow until attention sees only one position.

At due steps the training process computes the attention logits of some heads and queries of one
sample again: their largest (`logit_max`) and the entropy of the probabilities, as a share of the
largest possible one. Three conditions on a layer, by branch:

- `limit`: the largest logit is above `limit` in two summaries in a row, or once above `factor`
  times that. A softmax over logits that far apart selects one position and has no gradient. With a
  scale of 1/sqrt(width) healthy trainings stay below some tens (of small GPTs at most 43, and 2,212
  at thirty times the best learning rate); those that diverged had thousands (Wortsman et al.,
  "Small-scale proxies for large-scale Transformer training instabilities", 2023), and Kimi K2 clips
  at 100.
- `growth`: it is above `limit` / `factor`, has risen in each of the last three summaries, and is
  more than `factor` times what it was at most `window` steps ago: at this pace it meets the limit
  within as many steps. Every training starts with small logits that grow, so the rule ignores them
  until they are half-way to the limit. An info.
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
from tocsin.schemas.records.issues import Evidence, Series, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors
from tocsin.stream_rules.signals.layer_history import Flags, LayerHistory

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
class _State:
    frames: LowestRankRows = field(default_factory=LowestRankRows)
    levels: LayerHistory = field(default_factory=LayerHistory)
    shares: LayerHistory = field(default_factory=LayerHistory)
    since: dict[str, int] = field(default_factory=dict)


class AttentionLogitGrowth(Rule[AttentionLogitGrowthParams, _State]):
    """An episode for each branch; it names the worst layer."""

    meta = RuleMeta(
        name="attention_logit_growth",
        version=1,
        family="large_models",
        meaning="The logits of an attention layer have grown so much that it sees only one "
        "position.",
        severity="warning",
        comes="maybe",
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
    by_part = True

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state = self.state
        whole = state.frames.assemble(frame)
        bound = None if whole is None else whole.column("qk_bound")
        if whole is None or bound is None or not len(whole.rows):
            return
        level = bound.astype(np.float64)
        largest = whole.column("logit_max")
        if largest is not None:
            level = np.where(np.isfinite(largest), largest, level)
        state.levels.add(whole.step, whole.rows, level)
        yield from self._branch("limit", self._over_limit(), whole.step, level)
        yield from self._branch("growth", self._growing(whole.step), whole.step, level)
        share = whole.column("entropy_share")
        if share is not None:
            percent = 100 * share.astype(np.float64)
            state.shares.add(whole.step, whole.rows, percent)
            yield from self._branch("entropy_collapse", self._collapsed(), whole.step, -percent)

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

    def _branch(self, branch: str, bad: Flags, step: int, worth: Doubles) -> Outcomes:
        state = self.state
        found = [int(i) for i in np.flatnonzero(bad)]
        if not found:
            state.since.pop(branch, None)
            yield Clear(step, about=branch)
            return
        found.sort(key=lambda i: -worth[i])
        state.since.setdefault(branch, step)
        yield self._finding(branch, found)

    def _finding(self, branch: str, found: list[int]) -> Finding:
        state, params, first = self.state, self.params, found[0]
        levels = state.levels
        name, level = levels.rows[first], float(levels.values[-1, first])
        history, unit, limit = levels, None, params.limit
        if branch == "limit":
            said = f"the largest attention logit of {name} is {level:.4g}, above {limit:.4g}"
        elif branch == "growth":
            then = levels.first_since(levels.steps[-1] - params.window)
            before = float(then[first]) if then is not None else level
            said = (
                f"the largest attention logit of {name} has grown from {before:.3g} to "
                f"{level:.4g} in {min(params.window, levels.steps[-1] - levels.steps[0])} steps"
            )
        else:
            history, unit, limit = state.shares, "percent", params.least_entropy_percent
            percent = float(state.shares.values[-1, first])
            said = (
                f"the attention of {name} sees one position: its entropy is {percent:.2g} % of the "
                "largest possible"
            )
        steps, values = history.of(first)
        others = f", and so do {len(found) - 1} other layers" if len(found) > 1 else ""
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="layer", name=name, collection="attention"),
            reason=said + others,
            first_step=state.since[branch],
            first_rank=state.frames.rank,
            severity="warning" if branch == "limit" else "info",
            evidence=Evidence(
                facts=(
                    fact("largest_logit", level, limit=params.limit),
                    *(
                        fact(
                            "entropy",
                            state.shares.values[-1, row],
                            limit=params.least_entropy_percent,
                            unit="percent",
                        )
                        for row, layer in enumerate(state.shares.rows)
                        if layer == name
                    ),
                ),
                series=Series(
                    name="entropy of the attention" if unit else "largest attention logit",
                    unit=unit,
                    steps=steps,
                    values=values,
                    limit=limit,
                ),
                followed=len(found) - 1,
                also=named(levels.rows, found[1:]),
            ),
        )
