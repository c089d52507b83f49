"""What is asked of a cluster, whichever way it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tocsin.actions.targets.kind import StopAsked
from tocsin.actions.targets.slurm.jobs import ListedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a cluster lists under a job's name.

    Attributes:
        cluster: the cluster's own name; "" if no job is listed and nothing else tells it.
        all_shown: whether a job that is not listed has ended, long enough ago to be forgotten. It
            may also be hidden from whoever asks.
        failure: why there is no list; then the rest says nothing.
    """

    jobs: tuple[ListedJob, ...] = ()
    cluster: str = ""
    all_shown: bool = False
    failure: str = ""


class Controller(Protocol):
    """A cluster. No method raises, and each bounds its time; a name is as `WantedJob.called`."""

    async def jobs(self, called: str) -> Listing:
        """The jobs of that name."""
        ...

    async def set_requeue(self, called: str, *, allowed: bool) -> StopAsked:
        """Say whether that job may be queued again, by anybody."""
        ...

    async def cancel(self, called: str) -> StopAsked:
        """Cancel that job: SIGTERM, and SIGKILL after the cluster's KillWait."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
