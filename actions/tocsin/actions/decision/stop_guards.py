"""The stage of the stops: the switch for all of them, the mode, and the limits. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from tocsin.actions.decision.planned import Held, Place, Planned
from tocsin.schemas.configuration.policy import StopLimits
from tocsin.schemas.configuration.sections import StopMode, StopOptions
from tocsin.schemas.configuration.values import format_duration, format_percent

HOUR_MS: Final = 3_600_000
TEAM: Final = "team"
"""The label by which runs are those of a team."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the limits count, without the stop in question.

    Attributes:
        running: runs that are running, the one in question included.
        stops: runs that were asked to stop within the last hour.
        team_stops: of these, those of the team of the run in question.
        age_ms: for how long that run has been running; None: not known.
    """

    running: int = 1
    stops: int = 0
    team_stops: int = 0
    age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StopGuards:
    """What the configuration has between the decision to stop a run and the stop.

    Attributes:
        mode: that of stops without their own.
        limits: None where they do not apply.
    """

    mode: StopMode = "enforce"
    limits: StopLimits | None = None
    place: Place = lambda loc: ".".join(map(str, loc))

    @property
    def counts_runs(self) -> bool:
        """Whether a limit needs to be known of all runs."""
        return self.limits is not None and self.limits.any

    def guarded(self, stop: Planned, fleet: Callable[[], Fleet], off: str) -> Planned:
        """A planned stop with what keeps it from being sent, or why people are asked first.

        Args:
            stop: one that nothing else forbids.
            fleet: counts what the limits need; called only if there are any.
            off: why all stops are switched off; empty if they are not.
        """
        if off:
            return replace(stop, held=Held("switch", off))
        mode = (stop.options or StopOptions()).mode or self.mode
        if mode == "shadow":
            why = "mode: shadow: the run would have been stopped"
            return replace(stop, held=Held("shadow", why))
        limits = self.limits
        beyond = self._beyond(limits, fleet()) if limits is not None and limits.any else None
        if limits is not None and beyond is not None:
            if limits.on_exceed == "notify_only":
                return replace(stop, held=Held("limit", f"no stop beyond a limit: {beyond}"))
            return replace(stop, asks=f"beyond a limit: {beyond}")
        return replace(stop, asks="mode: ask") if mode == "ask" else stop

    def _beyond(self, limits: StopLimits, fleet: Fleet) -> str | None:
        """Which limit the stop would exceed, with its place; None: none."""
        for key, sentence in _exceeded(limits, fleet):
            return f"{sentence} ({self.place(('limits', 'stops', key))})"
        return None


def _exceeded(limits: StopLimits, fleet: Fleet) -> Iterator[tuple[str, str]]:
    if limits.per_hour is not None and fleet.stops >= limits.per_hour:
        yield "per_hour", f"stops within an hour: {fleet.stops}, permitted: {limits.per_hour}"
    team = limits.per_team_per_hour
    if team is not None and fleet.team_stops >= team:
        yield (
            "per_team_per_hour",
            f"stops of this team within an hour: {fleet.team_stops}, permitted: {team}",
        )
    share = limits.max_fraction_of_running
    # What was stopped within the hour ran, too. One stop is always permitted.
    if share is not None and fleet.stops >= 1:
        of = fleet.running + fleet.stops
        if fleet.stops + 1 > share * of:
            text = f"{fleet.stops + 1} stops of {of} runs, {format_percent(share)} permitted"
            yield "max_fraction_of_running", text
    age = limits.min_job_age
    young = fleet.age_ms is not None and timedelta(milliseconds=fleet.age_ms) < (age or timedelta())
    if age is not None and young:
        yield "min_job_age", f"the run has been running for less than {format_duration(age)}"
