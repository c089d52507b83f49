"""`checkpoint_stall`: writing checkpoints takes too long, or takes longer each time.

- long: one write takes longer than `threshold`. Start and end marks (`run.phase("checkpoint")`, the
  frameworks' callbacks) show this during the write; otherwise its duration shows it afterwards.
- growing: all writes of one step are added up. The condition is that each of the last three steps
  with a checkpoint took longer than (1 + `percent` / 100) times the median of all earlier ones (at
  least six), and longer by `least`, while the size did not grow by half as much. Larger files
  naturally take longer, and writes into a page cache vary by about a second. An info; a warning
  from one minute on.

The defaults of `threshold` and `percent` are choices, not measurements: a job that writes for ten
minutes loses an hour a day at a checkpoint every two and a half hours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Final

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.issues import Series, Subject
from tocsin.schemas.records.runs import (
    Heartbeat,
    PhaseMark,
    RunData,
    RunEnded,
)
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event

_PHASE: Final = "checkpoint"
_BEFORE: Final = 6
_ROW: Final = 3
_GRAVE_S: Final = 60.0
_MAX_GRACE_MS: Final = 60_000


class CheckpointStallParams(Params):
    """Parameters of `checkpoint_stall`."""

    threshold: Duration = Field(default=timedelta(minutes=10), examples=["10m"])
    """How long a write may take. Unit: a duration."""
    percent: float = Field(default=100.0, gt=0)
    """How much longer writes must take. Unit: percent of the earlier median."""
    least: Duration = Field(default=timedelta(seconds=10), examples=["10s"])
    """Minimum increase that counts as growing. Unit: a duration."""


@dataclass(slots=True)
class _Write:
    began_ms: int
    boot: str
    seq: int
    step: int


@dataclass(slots=True)
class _State:
    under: dict[int, _Write] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)
    reported_steps: dict[int, int] = field(default_factory=dict)
    """Of each rank, the step whose write was reported and is over: its files are known later."""
    rank: int | None = None
    step: int = -1
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    row: int = 0
    first_step: int = 0
    first_ms: int = 0


class CheckpointStall(Rule[CheckpointStallParams, _State]):
    """An episode for each rank that writes for too long, and one for writes that take longer each
    time."""

    meta = RuleMeta(
        name="checkpoint_stall",
        version=1,
        family="progress",
        meaning="Writing a checkpoint takes too long, or takes longer each time.",
        severity="warning",
        available="later",
        inputs=(event(CheckpointWritten), event(PhaseMark), event(Heartbeat, optional=True)),
        capture_hint="torch.save, safetensors and the frameworks' checkpoints are noticed; mark "
        'others by run.phase("checkpoint")',
        remedy="Check the file system of the checkpoint (space, quota, other jobs). Write to a "
        "local disk first, asynchronously, or from fewer ranks.",
        does_not_see="A write that hangs and is not marked as a phase, until it ends: "
        "stalled_training reports the missing steps. The background part of an asynchronous write.",
        branches={
            "long": "One write takes longer than the threshold.",
            "growing": "Writes take longer than before, with no more bytes.",
        },
        params=CheckpointStallParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def next_due_ms(self) -> int | None:
        threshold_ms = self.params.threshold // timedelta(milliseconds=1)
        state = self.state
        return min(
            (
                w.began_ms + threshold_ms
                for rank, w in state.under.items()
                if rank not in state.reported
            ),
            default=None,
        )

    def grace_ms(self) -> int:
        return min(_MAX_GRACE_MS, self.params.threshold // timedelta(milliseconds=1))

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, CheckpointWritten):
            yield from self._written(data, at)
        elif isinstance(data, PhaseMark) and data.name == _PHASE:
            if data.edge == "begin":
                step = -1 if data.step is None else data.step
                self.state.under[data.rank] = _Write(at.now_ms, at.boot, at.seq, step)
            else:
                yield from self._over(data.rank)
        elif isinstance(data, Heartbeat) and data.role == "trainer" and data.busy is None:
            # Its end mark was lost. The launcher's heartbeat has rank 0 and knows of no phase.
            yield from self._over(data.rank)
        elif isinstance(data, RunEnded):
            ranks = list(self.state.under) if at.run.ended else [data.rank]
            for rank in ranks:
                yield from self._over(rank)

    def on_timer(self, at: Moment) -> Outcomes:
        # In whole milliseconds, as in `next_due_ms`: what is due has to be reported.
        threshold_ms = self.params.threshold // timedelta(milliseconds=1)
        for rank, write in self.state.under.items():
            lasted_ms = at.now_ms - write.began_ms
            if rank not in self.state.reported and lasted_ms >= threshold_ms:
                self.state.reported.append(rank)
                yield self._long(rank, write, lasted_ms / 1000, "is being written", at)

    def _over(self, rank: int) -> Outcomes:
        write = self.state.under.pop(rank, None)
        if rank in self.state.reported:
            self.state.reported.remove(rank)
            if write is not None:
                self.state.reported_steps[rank] = write.step
            yield Clear(about=f"long {rank}")

    def _long(self, rank: int, write: _Write, lasted_s: float, what: str, at: Moment) -> Finding:
        return Finding(
            about=f"long {rank}",
            branch="long",
            subject=Subject(kind="rank", name=f"rank {rank}"),
            reason=f"the checkpoint after step {write.step} {what} for {lasted_s:,.0f} s",
            first_step=max(0, write.step),
            first_rank=rank,
            episode=f"{write.boot}/{write.seq}",
            onset_ms=write.began_ms,
            facts=(
                fact(
                    "lasts",
                    lasted_s,
                    limit=self.params.threshold / timedelta(seconds=1),
                    unit="s",
                ),
            ),
        )

    def _written(self, data: CheckpointWritten, at: Moment) -> Outcomes:
        state, rank = self.state, data.rank
        long = data.duration_s > self.params.threshold / timedelta(seconds=1)
        known = rank in state.reported or state.reported_steps.get(rank) == data.checkpoint.step
        if long and not known:
            began_ms = at.now_ms - round(1000 * data.duration_s)
            write = _Write(began_ms, at.boot, at.seq, data.checkpoint.step)
            yield self._long(rank, write, data.duration_s, "was written", at)
            yield Clear(about=f"long {rank}")
        if state.rank is not None and rank > state.rank:
            return
        if rank != state.rank:
            state.rank, state.step, state.steps = rank, -1, []
            state.seconds, state.sizes, state.row = [], [], 0
        step, size = data.checkpoint.step, float(data.checkpoint.size_bytes or 0)
        if step == state.step and state.seconds:
            state.seconds[-1] += data.duration_s
            state.sizes[-1] += size
            return
        if state.seconds:
            yield from self._grows(at)
        state.step = step
        state.steps = [*state.steps, max(0, step)][-SERIES_POINTS:]
        state.seconds = [*state.seconds, data.duration_s][-SERIES_POINTS:]
        state.sizes = [*state.sizes, size][-SERIES_POINTS:]

    def _grows(self, at: Moment) -> Outcomes:
        """Look at the newest step: all that was written at it is there."""
        state, params = self.state, self.params
        before = len(state.seconds) - 1 - state.row
        if before < _BEFORE:
            return
        usual = median(state.seconds[:before])
        size = median(state.sizes[:before])
        now, bytes_now = state.seconds[-1], state.sizes[-1]
        times = now / usual if usual > 0 else float("inf")
        larger = bytes_now / size if size > 0 else 1.0
        longer = (
            times > 1 + params.percent / 100
            and now - usual > params.least / timedelta(seconds=1)
            and larger - 1 < 0.5 * (times - 1)
        )
        if not longer:
            state.row = 0
            yield Clear(about="growing")
            return
        if state.row == 0:
            state.first_step, state.first_ms = state.steps[-1], at.now_ms
        state.row = min(state.row + 1, SERIES_POINTS - _BEFORE - 1)
        if state.row < _ROW:
            return
        yield Finding(
            about="growing",
            branch="growing",
            subject=Subject(kind="run", name=at.run.run_id),
            reason=f"writing a checkpoint takes {now:,.1f} s, {times:,.1f} times the usual "
            f"{usual:,.1f} s, since step {state.first_step}",
            first_step=state.first_step,
            first_rank=state.rank,
            onset_ms=state.first_ms,
            severity=None if now >= _GRAVE_S else "info",
            facts=(
                fact("takes", now, limit=usual * (1 + params.percent / 100), unit="s"),
                fact("usual", usual, unit="s"),
                fact("size", bytes_now, unit="bytes"),
                fact("usual_size", size, unit="bytes"),
            ),
            series=Series(
                name="time to write a checkpoint",
                unit="s",
                steps=tuple(state.steps),
                values=tuple(state.seconds),
                limit=usual * (1 + params.percent / 100),
            ),
        )
