"""`tree_depth`: a new tree of a boosted model is deeper than it should be.

A deep tree has many leaves with few samples each, so it memorises them. Read from the collection
`trees`, one row for each tree that the step has added, with the count `depth` (edges from the root
to the deepest leaf), or from the scalar `log.tree_depth`, the deepest of the step:
`run.log({"tree_depth": depth})`. SageMaker Debugger uses the logarithm to base 2 of the largest
node id, which gives the same depth with XGBoost's numbering.

It runs only if the configuration names it: the right depth depends on your task. The default is
XGBoost's own `max_depth`, so it reports models that were allowed more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcome, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.reading.tensor_rows import Doubles, named
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule

COLLECTION: Final = "trees"
SCALAR: Final = "log.tree_depth"


class TreeDepthParams(Params):
    """Parameters of `tree_depth`."""

    depth: int = Field(default=6, ge=1)
    """Largest allowed depth of a tree. Unit: levels below the root."""


@dataclass(slots=True)
class _State(RowState):
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    deepest: RankSeries = field(default_factory=RankSeries)
    first_step: int | None = None
    first_ms: int = 0


class TreeDepth(TensorRowRule[TreeDepthParams, _State]):
    """A warning; it resolves when new trees have been shallow enough for some steps."""

    meta = RuleMeta(
        name="tree_depth",
        version=1,
        family="trees",
        meaning="A new tree of a boosted model is deeper than it should be.",
        severity="warning",
        inputs=(tensors(COLLECTION), scalar(SCALAR)),
        available="later",
        by_default=False,
        history_steps=0,
        capture_hint='trees are not captured automatically: run.log({"tree_depth": depth}) after '
        "each round",
        remedy="Lower max_depth, raise min_child_weight or gamma, or use fewer samples and columns "
        "for each tree.",
        does_not_see="A tree with many leaves that is not deep. Trees that existed before.",
        alias="TreeDepth",
        presets={"sagemaker": {"depth": 4}},
        params=TreeDepthParams,
        resolve_after_steps=10,
    )
    state_type = _State
    by_part = False

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        depths = _depths(table)
        if depths is None or not np.isfinite(depths).any():
            return
        order = np.argsort(-np.nan_to_num(depths, nan=-1.0), kind="stable")
        deepest = int(order[0])
        over = [int(i) for i in order[1:] if depths[i] > self.params.depth]
        also = named(table.rows, over)
        rank = table.origin.rank
        yield self._evaluate(
            table.step, table.rows[deepest], float(depths[deepest]), len(over), also, rank, at
        )

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        if not self.state.rank_series.accepts(frame):
            return
        for step, depth in self.state.rank_series.points(frame, SCALAR):
            if np.isfinite(depth):
                yield self._evaluate(step, f"step {step}", depth, 0, (), frame.origin.rank, at)

    def _evaluate(
        self,
        step: int,
        name: str,
        depth: float,
        followed: int,
        also: tuple[str, ...],
        rank: int,
        at: Moment,
    ) -> Outcome:
        state, limit = self.state, self.params.depth
        state.deepest.add(step, depth)
        if depth <= limit:
            state.first_step = None
            return Clear(step)
        if state.first_step is None:
            state.first_step, state.first_ms = step, at.now_ms
        return Finding(
            subject=Subject(kind="layer", name=name, collection=COLLECTION),
            reason=f"tree {name} is {depth:.0f} levels deep, more than {limit}, since step "
            f"{state.first_step}",
            first_step=state.first_step,
            first_rank=rank,
            onset_ms=state.first_ms,
            facts=(fact("depth", depth, limit=limit, unit="levels"),),
            series=state.deepest.series(
                "depth of the deepest new tree", limit=float(limit), unit="levels"
            ),
            followed=followed,
            also=also,
        )


def _depths(frame: TensorFrame) -> Doubles | None:
    counts = frame.count("depth")
    if counts is not None:
        return counts.astype(np.float64)
    column = frame.column("depth")
    return None if column is None else column.astype(np.float64)
