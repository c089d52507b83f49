"""A kind of stop target: a backend that runs jobs, and how it is asked to end exactly one of them.

A kind is one package: its configuration and its `TargetKind`. `registry` names those that tocsin
has; an installed package offers one as an entry point of the group `tocsin.stop_targets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from pydantic import SecretStr

from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.errors import require_extra
from tocsin.schemas.records.runs import SchedulerJob

ConfigT = TypeVar("ConfigT", bound=TargetConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetContext:
    """What a target may use of the process around it.

    Attributes:
        secrets: their values, for `tocsin.schemas.configuration.settings.value_of`.
        guard: which addresses may be connected to.
        folder: where relative paths of the configuration start.
        environ: the environment.
    """

    secrets: Mapping[str, SecretStr]
    guard: AddressGuard
    folder: Path
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetJob:
    """The job that is to end.

    Attributes:
        run_id: the run.
        incarnation: the one that the stop is for. Another one must go on.
        scheduler: what the scheduler calls this incarnation's job, as the run recorded it.
        started_ms: when the bus first heard of this incarnation, Unix ms; 0 if that is not known. A
            job that the backend began clearly after it is another one.
        delivery_id: the stop. Equal in each attempt, so a backend can drop repeats.
        reason: why, one line, without secrets; backends that keep a reason are given it.
    """

    run_id: str
    incarnation: str
    scheduler: SchedulerJob
    started_ms: int
    delivery_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobSeen:
    """What a backend shows of the job.

    Attributes:
        state: `running`: this very incarnation is there, starting, running or being ended;
            `ended`: it is gone and will not be started again by itself;
            `replaced`: the backend runs another incarnation under that name, which must go on;
            `unknown`: the backend could not be asked, or does not know.
        reason: in the backend's words, one line: a state, a code. Never what a peer wrote at will.
    """

    state: Literal["running", "ended", "replaced", "unknown"]
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """What came of asking a backend to end the job.

    Attributes:
        result: `accepted`: it was asked, and `inspect` will show the end;
            `refused`: it will not do it, however often it is asked;
            `failed`: it may work later: the backend is away, or has too much to do.
        reason: why, one line.
        retry_after_ms: how long the backend wants to be left alone; None if it did not say.
    """

    result: Literal["accepted", "refused", "failed"]
    reason: str
    retry_after_ms: int | None = None


class Target(Protocol):
    """One backend of a service, in its event loop. Neither method raises or waits for ever: each
    bounds its own calls, and what fails becomes a value."""

    async def inspect(self, job: TargetJob) -> JobSeen:
        """Show whether the job still runs. Called before `stop`, and after it until the end."""
        ...

    async def stop(self, job: TargetJob) -> StopAsked:
        """Ask the backend to end exactly this incarnation, and to not start it again.

        May be called again for the same job, after an attempt whose answer was lost.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Called once, at the end."""
        ...


class TargetKind(Generic[ConfigT]):
    """One kind of target.

    Attributes:
        config: the model of what may be configured; its `type` is the kind's name.
        scheduler: which jobs it can end: `SchedulerJob.kind`; "" if its configuration says it.
        extra: the extra of tocsin that holds `libraries`.
        libraries: modules that must be installed.
    """

    config: type[ConfigT]
    scheduler: str = ""
    extra: str = "actions"
    libraries: Sequence[str] = ()

    def check(self, config: ConfigT, loc: Loc) -> Iterable[Problem]:
        """What is wrong with a target at `loc` beyond its shape. Pure."""
        return ()

    def warnings(self, config: ConfigT, loc: Loc) -> Iterable[Problem]:
        """What works in a target at `loc`, though hardly as meant. Pure."""
        return ()

    def can_end(self, config: ConfigT, scheduler: SchedulerJob) -> bool:
        """Whether a target with this configuration can end such a job. Pure."""
        return scheduler.kind == self.scheduler

    def target(self, name: str, config: ConfigT, context: TargetContext) -> Target:
        """The backend as it is configured. May read files; connects to nobody.

        Raises:
            ConfigurationError: it cannot be used. The message shows no secret.
        """
        raise NotImplementedError

    def check_installed(self) -> None:
        """Raises MissingExtra: one of the libraries is not installed."""
        [name] = get_args(self.config.model_fields["type"].annotation)
        require_extra(self.extra, f"a target of the type {name}", *self.libraries)


AnyTargetKind = TargetKind[Any]
