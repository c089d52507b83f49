"""`moe_imbalance`: a mixture of experts in which some experts get too many tokens, or none.

At the steps of its capture schedule, the training process counts, for a sample of up to 4,096
tokens, how often a router chooses each expert. By branch:

- `overload`: the most chosen expert has more than `ratio` times the mean load, in `for_summaries`
  summaries in a row. An expert that gets every token has experts / chosen times the mean, and none
  can have more. With few experts, the limit is therefore nine tenths of that. (Mixtral has 8
  experts of which each token gets 2: the largest possible load is 4 times the mean, and the limit
  3.6.) Switch Transformers drop tokens above 1 to 2 times the mean.
- `dead_expert`: an expert got no token in the last `dead_for` summaries, in which an even share
  would have been at least 300 tokens. An info; a warning if half of the experts or more are
  affected.

At the first step, the router of a healthy training is often completely uneven. In one of the
trainings that these thresholds were tested on, two of four experts got every token at first, and
1.2 to 1.7 times the mean from step 100 on, with or without a balancing loss. So one summary is not
enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.outcomes import Clear, Moment, Outcomes, fact
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.layer_history import LayerHistory
from tocsin.stream_rules.signals.streaks import Streaks

_NEARLY_ALL: Final = 0.9
_EXPECTED: Final = 300.0
_EXPERT: Final = "expert."


class MoeImbalanceParams(Params):
    """Parameters of `moe_imbalance`."""

    ratio: float = Field(default=4.0, gt=1)
    """Largest ratio of an expert's load to the mean load. Unit: a ratio."""
    for_summaries: int = Field(default=2, ge=1)
    """Consecutive summaries. Unit: summaries."""
    dead_for: int = Field(default=3, ge=1)
    """Number of summaries without a token for an expert. Unit: summaries."""


@dataclass(slots=True)
class _Routers:
    """Those with the same number of experts."""

    load: LayerHistory = field(default_factory=LayerHistory)
    high: Streaks = field(default_factory=Streaks)
    recent: list[StateArray] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    since: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _State(RowState):
    routers: dict[int, _Routers] = field(default_factory=dict)


class MoeImbalance(TensorRowRule[MoeImbalanceParams, _State]):
    """An episode for each branch and number of experts; it names the worst router."""

    meta = RuleMeta(
        name="moe_imbalance",
        version=2,
        family="large_models",
        meaning="The experts of a mixture get very unequal loads, or some get none.",
        severity="warning",
        available="maybe",
        inputs=(tensors("routers"),),
        capture_hint="routers are found by their module type (…Router, …Gate) or as a Linear next "
        "to as many experts, with the collection activations",
        remedy="Raise the weight of the balancing loss, add noise to the router or a bias for each "
        "expert, and lower the learning rate of the router.",
        branches={
            "overload": "One expert gets many times the mean load.",
            "dead_expert": "An expert has had no token for some summaries.",
        },
        does_not_see="Routers that are only functions; tokens that an expert drops because of its "
        "capacity; other ranks' tokens under expert parallelism.",
        params=MoeImbalanceParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def table_key(self, frame: TensorFrame) -> str:
        # One table for each number of experts.
        return str(len(_experts(frame)))

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        columns = _experts(table)
        if len(columns) < 2:
            return
        of = self.state.routers.setdefault(len(columns), _Routers())
        counts = table.counts[:, columns].astype(np.float64)
        tokens = table.count("numel")
        chosen = counts.sum(1)
        seen = chosen if tokens is None else tokens.astype(np.float64)
        mean = chosen / len(columns)
        with np.errstate(all="ignore"):
            load = np.where(mean > 0, counts.max(1) / mean, np.nan)
            most = np.where(chosen > 0, len(columns) * seen / chosen, np.inf)
        limit = np.minimum(self.params.ratio, _NEARLY_ALL * most)
        if list(table.rows) != of.high.rows:
            of.recent, of.tokens, of.steps = [], [], []
        of.high.update(table.rows, table.step, load > limit)
        of.load.add(table.step, table.rows, load)
        of.recent = [*of.recent, counts][-self.params.dead_for :]
        of.tokens = [*of.tokens, float(mean.min())][-self.params.dead_for :]
        of.steps = [*of.steps, table.step][-self.params.dead_for :]
        yield from self._overload(of, table, limit, counts)
        yield from self._dead(of, table, len(columns))

    def _overload(
        self, of: _Routers, table: TensorFrame, limit: Doubles, counts: Doubles
    ) -> Outcomes:
        about = f"overload/{counts.shape[1]}"
        bad = np.flatnonzero(of.high.length >= self.params.for_summaries).tolist()
        if not bad:
            yield Clear(table.step, about=about)
            return
        load = of.load.values[-1]
        bad.sort(key=lambda i: -load[i])
        first, expert = bad[0], int(np.argmax(counts[bad[0]]))
        yield self.row_finding(
            table,
            bad,
            kind="layer",
            about=about,
            branch="overload",
            reason=f"expert {expert} of {table.rows[first]} has {load[first]:.2g} times the mean "
            f"load ({counts.shape[1]} experts)",
            others=", and so have {} other routers",
            first_step=int(of.high.since[first]),
            facts=(
                fact("load", load[first], limit=limit[first]),
                fact("expert", expert),
                fact("experts", counts.shape[1]),
            ),
            series=of.load.series(
                first,
                "load of the most chosen expert",
                unit="times the mean",
                limit=float(limit[first]),
            ),
        )

    def _dead(self, of: _Routers, table: TensorFrame, experts: int) -> Outcomes:
        about = f"dead_expert/{experts}"
        if len(of.recent) < self.params.dead_for or sum(of.tokens) < _EXPECTED:
            return
        none = np.sum(of.recent, axis=0) == 0
        rows = np.flatnonzero(none.any(1)).tolist()
        if not rows:
            of.since.pop(about, None)
            yield Clear(table.step, about=about)
            return
        rows.sort(key=lambda i: -int(none[i].sum()))
        first, name = rows[0], table.rows[rows[0]]
        dead = np.flatnonzero(none[first]).tolist()
        of.since.setdefault(about, of.steps[0])
        which = f"expert {dead[0]}" if len(dead) == 1 else f"{len(dead)} of {experts} experts"
        finding = self.row_finding(
            table,
            rows,
            kind="layer",
            about=about,
            branch="dead_expert",
            reason=f"{which} of {name} had no token in the last {len(of.recent)} summaries",
            others=", nor had some of {} other routers",
            first_step=of.since[about],
            severity="warning" if 2 * len(dead) >= experts else "info",
            facts=(
                fact("dead_experts", len(dead)),
                fact("experts", experts),
                fact("summaries", len(of.recent)),
            ),
        )
        also = tuple(f"{name}: expert {i}" for i in dead[:32])
        yield replace(finding, evidence=finding.evidence.model_copy(update={"also": also}))


def _experts(frame: TensorFrame) -> list[int]:
    """Which of the counts are those of experts."""
    return [i for i, name in enumerate(frame.count_columns) if name.startswith(_EXPERT)]
