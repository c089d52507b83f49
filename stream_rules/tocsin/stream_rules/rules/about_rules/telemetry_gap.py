"""`telemetry_gap`: some records of the run were lost, were not checked, or are checked late.

- dropped: the training process dropped records, because its queue was full or the bus was
  unreachable; its heartbeats count them.
- missing: records did not arrive. Each process numbers its records, and some numbers are missing.
- shed: the worker could not keep up and spent most of its time on this run, so it skipped summaries
  of tensors: those of most collections first, then gradients, weights, biases, updates, losses and
  checksums. Events, scalars, samples of nodes and summaries with NaN or Inf are always checked.
  Whole steps are skipped, so that ranks are still compared with each other.
- postponed: what may be skipped was not enough. The worker reads other runs first and this one as
  far as time is left: nothing is lost, but issues and stops of this run come late. Always a
  warning. It resolves when the run has caught up.

The first two are counted from the first record that arrives, so a run that is read from its middle
on is not reported. The first three are reported once per heartbeat, as an info; as a warning if
they exceed `percent` of the records sent in the meantime, and at least `least` records. They
resolve when nothing was lost for `quiet`. The limits are choices: rules tolerate single missing
steps, and a restart of the bus costs a run of minutes about one record in a hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import (
    Heartbeat,
    RunData,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.text import share_text
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event

Loss = Literal["dropped", "missing", "shed"]
POSTPONED: Final = "postponed"


class TelemetryGapParams(Params):
    """Parameters of `telemetry_gap`."""

    percent: float = Field(default=1.0, ge=0, lt=100)
    """Warning above this share. Unit: percent of the records of the run."""
    least: int = Field(default=20, ge=1)
    """Minimum number of records for a warning. Unit: records."""
    quiet: Duration = Field(default=timedelta(seconds=60), examples=["60s"])
    """Time without losses after which it resolves. Unit: a duration."""


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
    shed_before: int = 0
    dropped: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    losses: dict[str, _Loss] = field(default_factory=dict)
    postponed: bool = False


class TelemetryGap(Rule[TelemetryGapParams, _State]):
    """One episode each for dropped records, missing ones, those that were not judged, and for the
    time in which all are judged late."""

    meta = RuleMeta(
        name="telemetry_gap",
        version=1,
        family="about_rules",
        meaning="Some records of the run were dropped, did not arrive, or were left out by a "
        "worker that could not keep up, so rules did not see them; or they are read late.",
        severity="info",
        inputs=(event(Heartbeat), event(RunEnded), event(RunStarted)),
        available="maybe",
        remedy="Check that the bus is healthy and close enough, and that the node is not out of "
        "memory or CPU; capture less often. If the worker could not keep up, start more workers. "
        "The training itself is not affected.",
        does_not_see="Data that was never captured, because capture was switched off or degraded: "
        "`tocsin status` shows that. Losses before the first record that arrived.",
        branches={
            "dropped": "The training process dropped records.",
            "missing": "Records were sent but did not arrive.",
            "shed": "The worker could not keep up and did not judge summaries of tensors of this "
            "run, which used most of its time.",
            POSTPONED: "The worker could not keep up and reads other runs first: issues of this "
            "run come late.",
        },
        params=TelemetryGapParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
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
        shed = at.run.shedding.records
        yield from self._count("shed", max(0, shed - state.shed_before), at)
        state.shed_before = shed
        yield from self._postponed(at)

    def _postponed(self, at: Moment) -> Outcomes:
        was, why = self.state.postponed, at.run.postponed
        self.state.postponed = bool(why)
        if why and was:
            yield Holds(about=POSTPONED)
        elif why:
            yield Finding(
                about=POSTPONED,
                branch=POSTPONED,
                subject=Subject(kind="run", name=at.run.run_id),
                reason="the worker reads other runs first, because this one sends more than it can "
                "read: issues of this run come late, and nothing is lost",
                first_step=at.run.last_step,
                first_rank=at.rank,
                episode=f"{at.boot}/{at.seq}",
                onset_ms=at.now_ms,
                severity="warning",
                explanation=why,
            )
        elif was:
            yield Clear(about=POSTPONED)

    def _count(self, branch: Loss, more: int, at: Moment) -> Outcomes:
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

    def _finding(self, branch: Loss, loss: _Loss, at: Moment) -> Finding:
        params = self.params
        sent = sum(self.state.sent.values())
        percent = 100 * loss.counted / max(1, sent + loss.counted)
        grave = loss.counted >= params.least and percent > params.percent
        what = {
            "dropped": "records were dropped by the training process",
            "missing": "records have not arrived, or not yet",
            "shed": "summaries of tensors were not judged",
        }[branch]
        spans = at.run.shedding.spans if branch == "shed" else []
        steps = f" from step {spans[0].from_step} to {_last_step(at)}" if spans else ""
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="run", name=at.run.run_id),
            reason=f"{loss.lost:,} {what}{steps}; {loss.counted:,} in all, "
            f"{share_text(percent)} % of what the run has sent",
            first_step=loss.first_step,
            first_rank=at.rank,
            episode=f"{loss.boot}/{loss.seq}",
            onset_ms=loss.since_ms,
            severity="warning" if grave else None,
            facts=(
                fact("lost", loss.lost, unit="records"),
                fact("lost_in_all", loss.counted, unit="records"),
                fact("share", percent, limit=params.percent, unit="percent"),
                fact("arrived", sent, unit="records"),
            ),
            explanation=spans[-1].why if spans else "",
        )


def _last_step(at: Moment) -> int:
    """The last step of which a summary was left out, so far."""
    shedding = at.run.shedding
    until = shedding.spans[-1].until_step
    return shedding.top_step if until is None else until - 1
