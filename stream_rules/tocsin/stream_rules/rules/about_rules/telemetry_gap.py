"""`telemetry_gap`: some of what the run said has not come here.

- dropped: the training process threw records away, because its queue was full or the bus was away;
  its heartbeats count them.
- missing: records did not arrive: each process numbers its own, and numbers are left out.

Both are counted from the first record on that comes here, so that a run which is looked at from its
middle on misses nothing. What is lost is told once a heartbeat; an info, and a warning where it is
more than `percent` of what was sent in the meantime, and at least `least` records. It is over when
nothing was lost for `quiet`. The limits are choices: rules pass over single missing steps, and one
record in a hundred is what a bus that was restarted costs a run of minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.issues import Evidence, Fact, Subject
from tocsin.schemas.records.runs import Heartbeat, RunData, RunEnded, RunStarted
from tocsin.schemas.text import share_text
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Holds,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    event,
)

Branch = Literal["dropped", "missing"]


class TelemetryGapParams(Params):
    """Parameters of `telemetry_gap`."""

    percent: float = Field(default=1.0, ge=0, lt=100)
    """Above it, a warning. Unit: percent of the records of the run."""
    least: int = Field(default=20, ge=1)
    """How many records it takes for a warning. Unit: records."""
    quiet: Duration = Field(default=timedelta(seconds=60), examples=["60s"])
    """It is over when nothing was lost for so long. Unit: a duration."""


@dataclass(slots=True)
class _Loss:
    counted: int = 0
    since_ms: int = 0
    last_ms: int = 0
    first_step: int | None = None
    boot: str = ""
    seq: int = 0
    lost: int = 0
    open: bool = False


@dataclass(slots=True)
class _State:
    missing_before: int | None = None
    dropped: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    losses: dict[str, _Loss] = field(default_factory=dict)


class TelemetryGap(Rule[TelemetryGapParams, _State]):
    """One episode for what was dropped and one for what is missing."""

    meta = RuleMeta(
        name="telemetry_gap",
        version=1,
        family="about_rules",
        meaning="Some of what the run said was dropped or has not arrived: rules saw less of it.",
        severity="info",
        inputs=(event(Heartbeat), event(RunEnded), event(RunStarted)),
        comes="maybe",
        remedy="See whether the bus is well and near enough, and whether the node is out of memory "
        "or CPU; capture less often. The training itself is not harmed.",
        does_not_see="What a training never said, because capture was switched off or degraded: "
        "`tocsin status` shows that. What was lost before the first record that came here.",
        branches={
            "dropped": "The training process has thrown records away.",
            "missing": "Records were sent and have not arrived.",
        },
        params=TelemetryGapParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Iterable[Outcome]:
        state = self.state
        first = state.missing_before is None
        if state.missing_before is None:
            state.missing_before = at.run.missing
        if isinstance(data, Heartbeat | RunEnded) and data.capture is not None:
            dropped, before = data.capture.dropped, state.dropped.get(data.rank)
            if before is None:
                # A rank that is heard from its middle on has dropped what nobody waited for.
                before = dropped if first else 0
            state.dropped[data.rank] = dropped
            state.sent[data.rank] = data.capture.records
            yield from self._count("dropped", max(0, dropped - before), at)
        missing, state.missing_before = at.run.missing - state.missing_before, at.run.missing
        yield from self._count("missing", max(0, missing), at)

    def _count(self, branch: Branch, more: int, at: Moment) -> Iterable[Outcome]:
        loss = self.state.losses.get(branch)
        if not more:
            if loss is None or not loss.open:
                return
            quiet_ms = self.params.quiet // timedelta(milliseconds=1)
            if at.now_ms - loss.last_ms < quiet_ms:
                yield Holds(about=branch)
                return
            loss.open, loss.lost = False, 0
            yield Clear(about=branch)
            return
        if loss is None:
            loss = self.state.losses[branch] = _Loss()
        if not loss.open:
            loss.open, loss.since_ms = True, at.now_ms
            loss.first_step, loss.boot, loss.seq = at.run.last_step, at.boot, at.seq
        loss.counted += more
        loss.lost += more
        loss.last_ms = at.now_ms
        yield self._finding(branch, loss, at)

    def _finding(self, branch: Branch, loss: _Loss, at: Moment) -> Finding:
        params = self.params
        sent = sum(self.state.sent.values())
        percent = 100 * loss.counted / max(1, sent + loss.counted)
        grave = loss.counted >= params.least and percent > params.percent
        what = (
            "were dropped by the training process"
            if branch == "dropped"
            else "have not arrived, or not yet"
        )
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="run", name=at.run.run_id),
            reason=f"{loss.lost:,} records {what}; {loss.counted:,} in all, "
            f"{share_text(percent)} % of what the run has sent",
            first_step=loss.first_step,
            first_rank=at.rank,
            episode=f"{loss.boot}/{loss.seq}",
            onset_ms=loss.since_ms,
            severity="warning" if grave else None,
            evidence=Evidence(
                facts=(
                    Fact(name="lost", value=float(loss.lost), unit="records"),
                    Fact(name="lost_in_all", value=float(loss.counted), unit="records"),
                    Fact(name="share", value=percent, limit=params.percent, unit="percent"),
                    Fact(name="arrived", value=float(sent), unit="records"),
                )
            ),
        )
