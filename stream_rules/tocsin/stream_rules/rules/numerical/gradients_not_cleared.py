"""`gradients_not_cleared`: each step uses the sum of all gradients so far, as `zero_grad()` is
missing.

The training process looks at one small parameter when a backward call begins. A gradient that is
there already, and not zero, at every backward call since the last optimizer step was not cleared:
what the next step uses is added to what the last one has used. That is the column
`gradients_uncleared`, for how many steps in a row it was so; the issue comes at `for_steps` of
them. It is a fact and no estimate: several backward calls for one step (gradient accumulation)
begin with a gradient that is cleared, and so do several optimizers that take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Evidence, Fact, Subject
from tocsin.stream_rules.reading.rank_series import Lead
from tocsin.stream_rules.rule import Clear, Finding, Moment, Outcome, Params, Rule, RuleMeta, scalar

COLUMN: Final = "gradients_uncleared"


class GradientsNotClearedParams(Params):
    """Parameters of `gradients_not_cleared`."""

    for_steps: int = Field(default=2, ge=1)
    """How many steps in a row begin with the gradients of the last one. Unit: steps."""


@dataclass(slots=True)
class _State:
    lead: Lead = field(default_factory=Lead)


class GradientsNotCleared(Rule[GradientsNotClearedParams, _State]):
    """One episode for the run, for as long as gradients are not cleared."""

    meta = RuleMeta(
        name="gradients_not_cleared",
        version=1,
        family="numerical",
        meaning="Gradients are not cleared between two steps, and add up.",
        severity="warning",
        comes="maybe",
        inputs=(scalar(COLUMN),),
        capture_hint="it is seen when backward() is called before the step of an optimizer of "
        "PyTorch",
        remedy="Call optimizer.zero_grad() once for each step, before the first backward().",
        does_not_see="Gradients that are written by hand, and models of which no parameter has a "
        "dense gradient on this rank. On a GPU it is looked at in the first 8 steps and in 4 of "
        "each 50.",
        params=GradientsNotClearedParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        if not self.state.lead.takes(frame):
            return
        for step, streak in self.state.lead.points(frame, COLUMN):
            if not (math.isfinite(streak) and streak >= self.params.for_steps):
                yield Clear(step)
                continue
            first = max(0, step - int(streak) + 1)
            yield Finding(
                subject=Subject(kind="run", name="gradients"),
                reason=f"gradients are not cleared since step {first}: each step adds to those of "
                f"the one before, {int(streak)} times so far",
                first_step=first,
                first_rank=self.state.lead.rank,
                evidence=Evidence(
                    facts=(
                        Fact(
                            name="steps_uncleared",
                            value=float(streak),
                            limit=float(self.params.for_steps),
                            unit="steps",
                        ),
                    ),
                    series=self.state.lead.series("steps in a row without clearing"),
                    explanation="at each backward call since the step before, the gradient of a "
                    "parameter was there already and not zero",
                ),
            )
