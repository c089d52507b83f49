"""Stop targets as the configuration file names them: what all kinds have."""

from __future__ import annotations

from datetime import timedelta

from pydantic import ConfigDict, Field

from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import Duration


class TargetConfig(Section):
    """One stop target. Each kind derives a model of its own, whose `type` is the kind's name."""

    type: str = Field(min_length=1, max_length=32, examples=["slurm"])
    """The kind of target."""
    grace: Duration = Field(default=timedelta(seconds=30), examples=["30s"])
    """What the backend itself gives a job between SIGTERM and SIGKILL. Unit: a duration."""
    confirm_within: Duration = Field(default=timedelta(minutes=5), examples=["5m"])
    """How long to look for the end of the job after the backend was asked; then the stop expires.
    Unit: a duration."""


class UnreadTarget(TargetConfig):
    """A target in a process that asks none: only what all kinds have was read of it."""

    model_config = ConfigDict(extra="ignore")
