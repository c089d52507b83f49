"""`telemetry_lost`: no data from a rank for longer than its heartbeat interval allows.

A separate thread sends a rank's heartbeats, so their absence means that the process is gone or
suspended, that its node is down or disconnected, or that the connection to the bus is. The rule
only alerts; it never stops a job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import (
    Heartbeat,
    RunData,
    RunEnded,
    RunStarted,
)
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar, tensors

_HEARTBEATS: Final = 3
_MAX_GRACE_MS: Final = 60_000


class TelemetryLostParams(Params):
    """Parameters of `telemetry_lost`."""

    threshold: Duration = Field(default=timedelta(seconds=60), examples=["60s"])
    """Longest time without a record, at least three heartbeats. Unit: a duration."""


@dataclass(slots=True)
class _Heard:
    at_ms: int
    boot: str
    seq: int
    every_ms: int


@dataclass(slots=True)
class _State:
    heard: dict[int, _Heard] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    """Ranks that have ended: a heartbeat may come after it, and no other has to follow."""
    over: bool = False
    check_ms: int | None = None


class TelemetryLost(Rule[TelemetryLostParams, _State]):
    """One episode for all ranks that are silent at the same time; it names the first one."""

    meta = RuleMeta(
        name="telemetry_lost",
        version=1,
        family="progress",
        meaning="No data from a rank for longer than its heartbeat interval allows.",
        severity="warning",
        inputs=(
            event(RunStarted),
            event(Heartbeat),
            scalar("*", mode=None),
            tensors("*", mode=None),
        ),
        remedy="Check that the process and node are up and can reach the bus. Training itself may "
        "still be running.",
        params=TelemetryLostParams,
        does_not_see="The reason for the silence: a dead process, a disconnected node and an "
        "unreachable bus look the same. A rank that never sent anything is not missed.",
        resolve_after_steps=0,
    )
    state_type = _State
    by_presence = True

    def next_due_ms(self) -> int | None:
        return None if self.state.over else self.state.check_ms

    def grace_ms(self) -> int:
        return min(_MAX_GRACE_MS, self.params.threshold // timedelta(milliseconds=1))

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        return self._receive(frame.origin.rank, at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        return self._receive(frame.origin.rank, at)

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if at.run.ended:
            self.state.over = True
        if data.role != "trainer":
            return ()
        if isinstance(data, RunEnded):
            self.state.heard.pop(data.rank, None)
            self.state.ended.add(data.rank)
            return self._back(data.rank)
        if isinstance(data, RunStarted):
            self.state.ended.discard(data.rank)
        return self._receive(data.rank, at)

    def on_timer(self, at: Moment) -> Outcomes:
        state = self.state
        silent = sorted(
            (self._limit_ms(heard) + heard.at_ms, rank)
            for rank, heard in state.heard.items()
            if self._limit_ms(heard) + heard.at_ms <= at.now_ms
        )
        new = [rank for _, rank in silent if rank not in state.lost]
        state.lost = [rank for _, rank in silent]
        self._schedule()
        if new:
            yield self._finding(at)

    def _receive(self, rank: int, at: Moment) -> Outcomes:
        state = self.state
        if rank in state.ended:
            return ()
        heard = state.heard.get(rank)
        if heard is None:
            heard = _Heard(at.now_ms, at.boot, at.seq, at.run.heartbeat_ms(rank))
            state.heard[rank] = heard
            # Of thousands of ranks that come one by one, not all each time.
            end_ms = heard.at_ms + self._limit_ms(heard)
            state.check_ms = end_ms if state.check_ms is None else min(state.check_ms, end_ms)
        else:
            heard.at_ms, heard.boot, heard.seq = at.now_ms, at.boot, at.seq
            heard.every_ms = at.run.heartbeat_ms(rank)
        return self._back(rank)

    def _back(self, rank: int) -> Outcomes:
        state = self.state
        if rank not in state.lost:
            return ()
        state.lost.remove(rank)
        self._schedule()
        return () if state.lost else (Clear(),)

    def _schedule(self) -> None:
        """The time may be too early, never too late: hearing a rank only moves its end away."""
        state = self.state
        state.check_ms = min(
            (
                heard.at_ms + self._limit_ms(heard)
                for rank, heard in state.heard.items()
                if rank not in state.lost
            ),
            default=None,
        )

    def _limit_ms(self, sender: _Heard) -> int:
        threshold_ms = self.params.threshold // timedelta(milliseconds=1)
        return max(threshold_ms, _HEARTBEATS * sender.every_ms)

    def _finding(self, at: Moment) -> Finding:
        state = self.state
        first = state.lost[0]
        heard = state.heard[first]
        silent_s = (at.now_ms - heard.at_ms) / 1000
        launcher_ms = at.run.launcher_heard_ms()
        launcher = (
            "there is no launcher"
            if launcher_ms is None
            else f"the last record of the launcher came {(at.now_ms - launcher_ms) / 1000:,.0f} s "
            "ago"
        )
        step = at.run.rank_last_step(first)
        return Finding(
            subject=Subject(kind="rank", name=f"rank {first}"),
            reason=f"nothing from rank {first} for {silent_s:,.0f} s"
            + ("" if step is None else f" after step {step}"),
            first_step=None if step is None else step + 1,
            first_rank=first,
            episode=f"{heard.boot}/{heard.seq}",
            onset_ms=heard.at_ms,
            facts=(fact("silent", silent_s, limit=self._limit_ms(heard) / 1000, unit="s"),),
            followed=len(state.lost) - 1,
            also=tuple(f"rank {rank}" for rank in state.lost[1:33]),
            explanation=launcher,
        )
