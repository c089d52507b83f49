"""`max_initialization_time`: the job has started, but there is no training step for a long time.

The time runs from the first record of the run, the launcher's or a rank's, to the first step of any
rank. Other signs of work end it, too: evaluation losses and forward calls of the model, because a
program that only evaluates makes no step. The threshold comes from SageMaker Debugger's rule of the
same name, which does not fire for a late step, and inside its report never fires at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import Heartbeat, RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar

_MAX_GRACE_MS: Final = 60_000


class MaxInitializationTimeParams(Params):
    """Parameters of `max_initialization_time`."""

    threshold: Duration = Field(default=timedelta(minutes=20), examples=["20m"])
    """Longest time until the first step. Unit: a duration."""


@dataclass(slots=True)
class _State:
    started_ms: int | None = None
    boot: str = ""
    seq: int = 0
    works: bool = False
    reported: bool = False


class MaxInitializationTime(Rule[MaxInitializationTimeParams, _State]):
    """A warning, but an info as long as no rank has reported; resolved by the first step."""

    meta = RuleMeta(
        name="max_initialization_time",
        version=1,
        family="progress",
        meaning="The job has started, but has made no training step for a long time.",
        severity="warning",
        inputs=(event(RunStarted), event(Heartbeat), scalar("*", mode=None)),
        remedy="Check what the job is doing (py-spy dump --pid PID): preparing or downloading "
        "data, waiting for a rank, compiling, or hanging on a file system.",
        does_not_see="A program that calls its model but never makes a step: it counts as an "
        "evaluation. Work of the launcher's shell script before and after the training counts as "
        "part of the job.",
        alias="MaxInitializationTime",
        presets={"sagemaker": {"threshold": timedelta(minutes=20)}},
        params=MaxInitializationTimeParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def next_due_ms(self) -> int | None:
        state = self.state
        if state.started_ms is None or state.works or state.reported:
            return None
        return state.started_ms + self.params.threshold // timedelta(milliseconds=1)

    def grace_ms(self) -> int:
        return min(_MAX_GRACE_MS, self.params.threshold // timedelta(milliseconds=1))

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        if state.started_ms is None:
            state.started_ms, state.boot, state.seq = at.now_ms, at.boot, at.seq
        works = isinstance(data, Heartbeat) and (
            data.forward_calls > 0 or data.last_step is not None
        )
        if at.run.ended or at.run.leaving or works:
            return self._works()
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        return self._works()

    def on_timer(self, at: Moment) -> Outcomes:
        state = self.state
        state.reported = True
        waited_s = (at.now_ms - (state.started_ms or at.now_ms)) / 1000
        ranks = sorted(at.run.live_ranks())
        yield Finding(
            subject=Subject(kind="run", name=at.run.run_id),
            reason=f"no step in the {waited_s:,.0f} s since the job started",
            first_step=0,
            # Without a rank it may be a job that trains nothing.
            severity="warning" if ranks else "info",
            episode=f"{state.boot}/{state.seq}",
            onset_ms=state.started_ms,
            facts=(
                fact(
                    "without_step",
                    waited_s,
                    limit=self.params.threshold / timedelta(seconds=1),
                    unit="s",
                ),
            ),
            explanation=f"{len(ranks)} ranks have reported so far"
            if ranks
            else "no rank has reported so far: the training has not reached its optimizer",
        )

    def _works(self) -> Outcomes:
        if self.state.works:
            return ()
        self.state.works = True
        return (Clear(),) if self.state.reported else ()
