"""`stalled_training`: the process is alive, but makes no step.

Progress is a step of any rank, a new forward call in a heartbeat, or a phase that starts, ends or
continues (evaluation, checkpoint). Training stalls when there was no progress for the threshold,
but heartbeats still arrive. Without heartbeats, another rule applies, `telemetry_lost`: the steps
are unknown then. The rule does not fire before the first step, while data may still be prepared,
nor after a rank has exited its loop for a stop: it may be saving, and makes no further step.

After the last planned step, as the framework or `run.plan` reports it, none has to follow: a final
evaluation or an upload may take this long. It is an info, then.

After a gap in the heartbeats, a job that was suspended needs a moment for its next step. It gets
five median steps, and at least two heartbeats.

By default, the threshold is 300 s or 20 median step times, whichever is longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Series, Subject
from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.runs import Heartbeat, PhaseMark, RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar

_FLOOR_MS: Final = 300_000
_STEPS: Final = 20
_STEPS_AFTER_SILENCE: Final = 5
_RECENT: Final = 64
_MAX_GRACE_MS: Final = 60_000


class StalledTrainingParams(Params):
    """Parameters of `stalled_training`."""

    threshold: Duration | None = Field(default=None, examples=["30m"])
    """Longest time without progress. Unit: a duration; absent: 300s or 20 median steps."""


@dataclass(slots=True)
class _State:
    progress_ms: int | None = None
    progress_boot: str = ""
    progress_seq: int = 0
    heartbeat_ms: int = 0
    heartbeat_every_ms: int = 10_000
    back_ms: int = 0
    last_step: int = -1
    checked_ms: int = 0
    open: bool = False
    over: bool = False
    total_steps: int | None = None
    done_steps: int = 0
    forward_calls: dict[int, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class StalledTraining(Rule[StalledTrainingParams, _State]):
    """Fires only when no unread step is left on the bus."""

    meta = RuleMeta(
        name="stalled_training",
        version=1,
        family="progress",
        meaning="The training process is alive but has made no step for a long time.",
        severity="critical",
        inputs=(
            event(Heartbeat),
            event(PhaseMark),
            event(TrainingPlanned, optional=True),
            scalar("*", mode=None),
        ),
        remedy="Check where the ranks are (py-spy dump --pid PID): a data loader that waits, a "
        "collective that one rank has not joined, or a file system that hangs.",
        alias="StalledTrainingRule",
        params=StalledTrainingParams,
        presets={"sagemaker": {"threshold": "30m"}},
        does_not_see="A training that hangs before its first step: `max_initialization_time` "
        "covers it. Steps that change nothing count as progress. That a training has made its last "
        "step, unless its framework or `run.plan` reports how many are planned.",
        resolve_after_steps=0,
    )
    state_type = _State

    def next_due_ms(self) -> int | None:
        state = self.state
        if state.progress_ms is None or state.open or state.over:
            return None
        due = state.progress_ms + self._threshold_ms()
        # Looked at already, with no heartbeats: the next one looks again.
        return None if due <= state.checked_ms else due

    def grace_ms(self) -> int:
        return min(_MAX_GRACE_MS, self._threshold_ms())

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        if not frame.steps.size:
            return
        state = self.state
        if frame.mode == "train":
            state.last_step = max(state.last_step, at.step_of(frame))
            seconds = frame.column("step_time_s")
            if seconds is not None:
                state.steps = [*state.steps, *frame.steps.tolist()][-_RECENT:]
                state.seconds = [*state.seconds, *seconds.tolist()][-_RECENT:]
        yield from self._progress(at)

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if at.run.ended or at.run.leaving:
            self.state.over = True
        elif isinstance(data, TrainingPlanned):
            self._plan(data)
        elif isinstance(data, PhaseMark):
            yield from self._progress(at)
        elif isinstance(data, Heartbeat) and data.role == "trainer":
            yield from self._heartbeat(data, at)

    def _plan(self, data: TrainingPlanned) -> None:
        state = self.state
        if data.total_steps is not None:
            state.total_steps = data.total_steps
        if data.done_steps is not None:
            state.done_steps = data.done_steps

    def on_timer(self, at: Moment) -> Outcomes:
        self.state.checked_ms = at.now_ms
        self.state.over |= at.run.leaving
        if self.state.over:
            return
        silent = self._silent(at.now_ms, since_ms=self.state.heartbeat_ms)
        if not silent and self._had_its_chance(at.now_ms):
            yield self._finding(at)

    def _heartbeat(self, data: Heartbeat, at: Moment) -> Outcomes:
        state = self.state
        if self._silent(at.now_ms, since_ms=max(state.heartbeat_ms, state.progress_ms or 0)):
            state.back_ms = at.now_ms
        state.heartbeat_ms = at.now_ms
        state.heartbeat_every_ms = at.run.heartbeat_ms(data.rank)
        before = state.forward_calls.get(data.rank, 0)
        state.forward_calls[data.rank] = data.forward_calls
        if data.forward_calls > before or data.busy is not None:
            yield from self._progress(at)
        elif state.open:
            yield Holds()
        elif (
            state.progress_ms is not None
            and not state.over
            and at.now_ms - state.progress_ms >= self._threshold_ms()
            and self._had_its_chance(at.now_ms)
        ):
            yield self._finding(at)

    def _progress(self, at: Moment) -> Outcomes:
        state = self.state
        if state.last_step < 0:
            return
        state.progress_ms = at.now_ms
        state.progress_boot, state.progress_seq = at.boot, at.seq
        if state.open:
            state.open = False
            yield Clear()

    def _threshold_ms(self) -> int:
        if self.params.threshold is not None:
            return self.params.threshold // timedelta(milliseconds=1)
        return max(_FLOOR_MS, _STEPS * self._step_ms())

    def _step_ms(self) -> int:
        """The median of the recent step times; 0 if it is not known."""
        recent = sorted(filter(math.isfinite, self.state.seconds))
        median = recent[len(recent) // 2] if recent else 0.0
        return round(1000 * median) if 0 < median < 1e6 else 0

    def _silent(self, now_ms: int, *, since_ms: int) -> bool:
        return now_ms - since_ms > 3 * self.state.heartbeat_every_ms

    def _had_its_chance(self, now_ms: int) -> bool:
        """Whether a healthy job would have made a step since its heartbeats came back."""
        needed_ms = max(2 * self.state.heartbeat_every_ms, _STEPS_AFTER_SILENCE * self._step_ms())
        return now_ms - self.state.back_ms >= min(needed_ms, self._threshold_ms())

    def _finding(self, at: Moment) -> Finding:
        state = self.state
        state.open = True
        since = state.progress_ms if state.progress_ms is not None else at.now_ms
        silent_s = (at.now_ms - since) / 1000
        last = {rank: at.run.rank_last_step(rank) for rank in at.run.live_ranks()}
        behind = min(
            last, key=lambda rank: (-1 if last[rank] is None else last[rank], rank), default=0
        )
        step, total = last.get(behind), state.total_steps
        # Beyond it, the plan was of something else: of the first of two trainings in a row.
        done = total is not None and total == state.done_steps + state.last_step + 1
        after = f"step {state.last_step}" + (
            f", the last of {total:,} planned ones" if done else ""
        )
        return Finding(
            subject=Subject(kind="run", name=at.run.run_id),
            severity="info" if done else None,
            reason=f"no step for {silent_s:,.0f} s after {after}, while rank {behind} still sends "
            "heartbeats",
            first_step=state.last_step + 1,
            first_rank=behind,
            episode=f"{state.progress_boot}/{state.progress_seq}",
            onset_ms=since,
            facts=(
                fact("without_progress", silent_s, limit=self._threshold_ms() / 1000, unit="s"),
                fact("last_step", -1 if step is None else step),
            ),
            series=Series(
                name="step_time_s",
                unit="s",
                steps=tuple(state.steps),
                values=tuple(state.seconds),
            )
            if state.steps
            else None,
            explanation="no step, no forward call, no evaluation and no checkpoint since; the "
            "rank named is the one with the fewest steps",
        )
