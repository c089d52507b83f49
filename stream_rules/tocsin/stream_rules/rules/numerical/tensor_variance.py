"""`tensor_variance`: the variance of a named tensor is outside the configured limits.

The variance is the square of the summary's standard deviation, over the tensor's finite values (of
an activation over a sample of them). The usual variance differs from tensor to tensor, so the rule
has no default limits and runs only if the configuration names tensors and a limit. A tensor is
outside after `for_summaries` consecutive summaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows, is_asked_for, named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors
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
class _Watched:
    frames: LowestRankRows = field(default_factory=LowestRankRows)
    below: Streaks = field(default_factory=Streaks)
    above: Streaks = field(default_factory=Streaks)


@dataclass(slots=True)
class _State:
    watched: dict[str, _Watched] = field(default_factory=dict)


class TensorVariance(Rule[TensorVarianceParams, _State]):
    """Off until the configuration sets tensors and a limit."""

    meta = RuleMeta(
        name="tensor_variance",
        version=1,
        family="numerical",
        meaning="The variance of a tensor is outside the configured limits.",
        severity="warning",
        comes="maybe",
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
    by_part = True

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        params = self.params
        if "std" not in frame.columns or (
            params.min_threshold is None and params.max_threshold is None
        ):
            return
        # Of activations a step has one frame for each set of columns.
        key = f"{frame.collection}|{','.join(frame.columns)}"
        watched = self.state.watched.get(key)
        if watched is None:
            watched = self.state.watched[key] = _Watched()
        whole = watched.frames.assemble(frame)
        spread = None if whole is None else whole.column("std")
        if whole is None or spread is None or not len(whole.rows):
            return
        variance = np.square(spread.astype(np.float64))
        asked = np.array(
            [is_asked_for(whole.collection, name, params.tensors) for name in whole.rows], bool
        )
        known = np.isfinite(variance)
        for branch, limit, streaks in (
            (LOW, params.min_threshold, watched.below),
            (HIGH, params.max_threshold, watched.above),
        ):
            if limit is None:
                continue
            out = (variance < limit) if branch == LOW else (variance > limit)
            length = streaks.update(whole.rows, whole.step, out & asked, known)
            high = length >= params.for_summaries
            found = np.flatnonzero(high & known)
            about = f"{branch}/{key}"
            if len(found):
                yield self._finding(about, branch, limit, whole, variance, found.tolist(), streaks)
            elif high.any():
                yield Holds(whole.step, about=about)
            else:
                yield Clear(whole.step, about=about)

    def _finding(
        self,
        about: str,
        branch: str,
        limit: float,
        frame: TensorFrame,
        variance: Doubles,
        found: list[int],
        streaks: Streaks,
    ) -> Finding:
        first = found[0]
        name, since = frame.rows[first], int(streaks.since[first])
        more = f", and {len(found) - 1} other tensors are out" if len(found) > 1 else ""
        return Finding(
            about=about,
            branch=branch,
            subject=Subject(kind="tensor", name=name, collection=frame.collection),
            reason=f"the variance of {frame.collection}/{name} is {variance[first]:.3g}, {branch} "
            f"{limit:.3g}, since step {since}{more}",
            first_step=since,
            first_rank=frame.speaker.rank,
            evidence=Evidence(
                facts=(fact("variance", variance[first], limit=limit),),
                followed=len(found) - 1,
                also=named(frame.rows, found[1:]),
            ),
        )
