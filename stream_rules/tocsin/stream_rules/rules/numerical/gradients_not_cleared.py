"""`gradients_not_cleared`: each step uses the sum of all gradients so far, because `zero_grad()` is
missing.

The training process checks one small parameter at the start of each backward call. If a non-zero
gradient is already present at every backward call since the last optimizer step, it was not
cleared: the next step adds to the gradients of the last one. The column `gradients_uncleared`
counts the consecutive steps; the issue fires at `for_steps` of them. This check is exact, not an
estimate: gradient accumulation and alternating optimizers start from a cleared gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar

COLUMN: Final = "gradients_uncleared"


class GradientsNotClearedParams(Params):
    """Parameters of `gradients_not_cleared`."""

    for_steps: int = Field(default=2, ge=1)
    """Consecutive steps that start with the gradients of the previous one. Unit: steps."""


@dataclass(slots=True)
class _State:
    rank_series: StoredRankSeries = field(default_factory=RankSeries)


class GradientsNotCleared(Rule[GradientsNotClearedParams, _State]):
    """One episode for the run, for as long as gradients are not cleared."""

    meta = RuleMeta(
        name="gradients_not_cleared",
        version=1,
        family="numerical",
        meaning="Gradients are not cleared between steps, so they accumulate.",
        severity="warning",
        available="maybe",
        inputs=(scalar(COLUMN),),
        capture_hint="seen when backward() is called before a PyTorch optimizer steps",
        remedy="Call optimizer.zero_grad() once for each step, before the first backward().",
        does_not_see="Gradients that are written by hand, and models without a dense gradient on "
        "this rank. On a GPU the check runs in the first 8 steps and in 4 of each 50.",
        params=GradientsNotClearedParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        if not self.state.rank_series.accepts(frame):
            return
        for step, streak in self.state.rank_series.points(frame, COLUMN):
            if not (math.isfinite(streak) and streak >= self.params.for_steps):
                yield Clear(step)
                continue
            first = max(0, step - int(streak) + 1)
            yield Finding(
                subject=Subject(kind="run", name="gradients"),
                reason=f"gradients have not been cleared since step {first}: each step adds to "
                f"those of the one before, {int(streak)} times so far",
                first_step=first,
                first_rank=self.state.rank_series.rank,
                facts=(fact("steps_uncleared", streak, limit=self.params.for_steps, unit="steps"),),
                series=self.state.rank_series.series("steps in a row without clearing"),
                explanation="at each backward call since the step before, the gradient of a "
                "parameter was there already and not zero",
            )
