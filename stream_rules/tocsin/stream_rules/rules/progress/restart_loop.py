"""`restart_loop`: the run fails again and again, each time the same way after its restart.

A scheduler, torchrun or a script that restarts a failed job from its newest checkpoint repeats the
fault if the cause is in that checkpoint, or in the data or the learning rate that follow it. The
condition: the first stop-worthy issue of this incarnation has the same rule as in `times` - 1
earlier incarnations of the run, and occurred at the same step, counted from the start of the
incarnation (within 2 steps, or 1 % of them). An end with the same exit code at the same step counts
as such a fault too. An incarnation that completes resets the count.

The issue names the checkpoint to resume from: the newest that 50 healthy steps followed, except the
one that the restarts have used, the newest of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunEnded
from tocsin.stream_rules.outcomes import Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.restarts import FAILED, Fault, Restarts
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event


class RestartLoopParams(Params):
    """Parameters of `restart_loop`."""

    times: int = Field(default=2, ge=2, le=64)
    """How many incarnations must fail the same way. Unit: incarnations."""


@dataclass(slots=True)
class _State:
    """It remembers nothing: what outlives an incarnation is in the run's own state."""


class RestartLoop(Rule[RestartLoopParams, _State]):
    """The engine calls it at the first fault of each incarnation."""

    meta = RuleMeta(
        name="restart_loop",
        version=1,
        family="progress",
        meaning="The run fails the same way after each restart.",
        severity="critical",
        stop_worthy=True,
        stops_because="each restart costs the same time again and ends the same way.",
        inputs=(event(RunEnded),),
        available="later",
        history_steps=0,
        remedy="Go back to an older checkpoint, skip the batches that follow it, or lower the "
        "learning rate. Restarting again from the same state gives the same fault.",
        does_not_see="Restarts under another run id, and faults that come at another step each "
        "time.",
        params=RestartLoopParams,
    )
    state_type = _State

    def failed_again(self, restarts: Restarts, at: Moment) -> Outcomes:
        """Called with the run's memory when the first fault of an incarnation is known."""
        now, before = restarts.fault, restarts.like_it()
        if now is None or len(before) + 1 < self.params.times:
            return
        older, newest = restarts.older_checkpoint(), restarts.newest_checkpoint()
        offsets = ", ".join(f"{fault.step:,}" for fault in [*before, now][-8:])
        advice = "no older checkpoint is known"
        if older is not None:
            advice = f"go back to {older.path} (step {older.step:,} of its incarnation)"
        yield Finding(
            subject=Subject(kind="run", name=at.run.run_id),
            reason=f"{_what(now)}, {now.step:,} steps after the start, as in {_count(before)} "
            f"before: {advice}",
            first_step=now.step,
            first_rank=at.rank,
            checkpoint=older,
            facts=(
                fact("incarnations", len(before) + 1, limit=self.params.times),
                fact("steps after the start", offsets),
                *([] if newest is None else [fact("newest checkpoint", newest.path)]),
            ),
            explanation=(
                "The restarts are likely to start with the newest checkpoint; the older one was "
                "followed by 50 healthy steps."
                if older is not None
                else ""
            ),
        )


def _what(fault: Fault) -> str:
    if fault.rule != FAILED:
        return fault.rule
    return f"the job failed with exit code {fault.how}" if fault.how else "the job failed"


def _count(before: Sequence[Fault]) -> str:
    return "the incarnation" if len(before) == 1 else f"the {len(before)} incarnations"
