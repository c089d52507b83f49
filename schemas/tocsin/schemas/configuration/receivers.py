"""Receivers as the configuration file names them: what all kinds have."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Final, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from tocsin.schemas.configuration.sections import SHORTEST_REPEAT, Section
from tocsin.schemas.configuration.values import Duration, Names, format_duration
from tocsin.schemas.records.issues import Severity

SHORTEST_DIGEST: Final = timedelta(minutes=10)


def _long_enough(interval: timedelta) -> timedelta:
    if interval < SHORTEST_DIGEST:
        raise ValueError(f"expected at least {format_duration(SHORTEST_DIGEST)}")
    return interval


DigestInterval = Annotated[Duration, AfterValidator(_long_enough)]


class RetryConfig(Section):
    """When to give up a failing delivery."""

    give_up_after: Duration = Field(default=timedelta(hours=24), examples=["24h"])
    """How long after the first attempt. Unit: a duration."""


class CircuitBreakerConfig(Section):
    """When to pause deliveries to a failing receiver; they wait, and none is lost."""

    failures: int = Field(default=5, ge=1, le=1000, examples=[5])
    """After how many deliveries in a row that fail. A single delivery that the receiver cannot
    process is not enough, however often it is tried."""
    probe_every: Duration = Field(default=timedelta(seconds=30), examples=["30s"])
    """How often to attempt one delivery then, to notice that the receiver works again. Unit: a
    duration."""


class UrgentConfig(Section):
    """Notices that repeat until somebody acknowledges or resolves the issue."""

    every: Duration = Field(examples=["60s"])
    """How often to repeat. Unit: a duration."""
    lasting: Duration = Field(default=timedelta(hours=1), alias="for", examples=["1h"])
    """How long to repeat so often; after that, as `repeat_interval` says. Unit: a duration."""
    severity: Severity = Field(default="critical", examples=["warning"])
    """Which issues are urgent: those of this severity and above."""

    @model_validator(mode="after")
    def _not_too_often(self) -> Self:
        if self.every < SHORTEST_REPEAT:
            raise ValueError(f"expected 'every' of at least {format_duration(SHORTEST_REPEAT)}")
        return self


class ReceiverConfig(Section):
    """One receiver. Each kind derives a model of its own, whose `type` is the kind's name."""

    type: str = Field(min_length=1, max_length=32, examples=["webhook"])
    """The kind of receiver."""
    send_resolved: bool | None = Field(default=None, examples=[False])
    """Whether to notify when an issue resolves, too; absent: `defaults.send_resolved`."""
    active: Names = Field(default=(), examples=["office-hours"])
    """Time windows; it is notified only while one of them is open."""
    mute: Names = Field(default=(), examples=["nights"])
    """Time windows; it is not notified while one of them is open."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When to give up."""
    concurrency: int | None = Field(default=None, ge=1, le=1000, examples=[4])
    """Attempts at the same time, at most. The default depends on the kind: 16 for most."""
    circuit_breaker: CircuitBreakerConfig = Field(default_factory=CircuitBreakerConfig)
    """When to pause deliveries to a failing receiver."""
    urgent: UrgentConfig | None = Field(default=None, examples=[{"every": "60s", "for": "1h"}])
    """How often to repeat notices until somebody answers; absent: as `repeat_interval` says."""
    links: bool = Field(default=True, examples=[False])
    """Whether its messages have a link by which whoever reads them can answer, and approve or
    reject a stop. It needs `public_url`."""
    digest: DigestInterval | None = Field(default=None, examples=["24h"])
    """How often to report that all is well, at least 10m: at the end of each interval (of UTC) in
    which a run was running and the receiver got no other notice; absent: never. Unit: a
    duration."""


class UnreadReceiver(ReceiverConfig):
    """A receiver in a process that sends to none: only what all kinds have was read of it."""

    model_config = ConfigDict(extra="ignore")
