"""The section `limits`: how much may be stopped, so that one wrong rule cannot stop a fleet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import Duration, Percent


class StopLimits(Section):
    """How much `tocsin actions` may stop. It counts the stops of all rules, on all runs of the bus.

    A run on an embedded bus, which only its own rules stop, has no limits.
    """

    per_hour: int | None = Field(default=None, ge=1, examples=[3])
    """Stops within an hour."""
    per_team_per_hour: int | None = Field(default=None, ge=1, examples=[2])
    """Stops within an hour of runs with the same label `team`."""
    max_fraction_of_running: Percent | None = Field(default=None, examples=["10%"])
    """Stops within an hour, as a share of the runs that are running. One is always permitted."""
    min_job_age: Duration | None = Field(default=None, examples=["5m"])
    """How long a run must have been running."""
    on_exceed: Literal["notify_only", "ask"] = Field(default="notify_only", examples=["ask"])
    """Beyond a limit: `notify_only` sends no stop; `ask` sends it when people approve."""

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        limits = (self.per_hour, self.per_team_per_hour, self.max_fraction_of_running)
        return any(limit is not None for limit in (*limits, self.min_job_age))


class LimitsConfig(Section):
    """Limits of what tocsin does by itself."""

    stops: StopLimits = StopLimits()
    """How much may be stopped."""
