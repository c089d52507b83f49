"""A backend of a test's own: what it runs, and what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetJob
from tocsin.schemas.records.runs import SchedulerJob

FARM_JOB = SchedulerJob(kind="farm", names={"job": "7", "restarts": "0"})


@dataclass
class Farm:
    """Runs one job, which is gone so many looks after it was asked to end.

    Attributes:
        restarts: how often the job was started again.
        takes: looks from the request to the end.
        state: `running`, `ended`, or `away`: it answers nobody.
        refuses: why it will not end the job; empty: it will.
        asked: each job that it was asked to end, with its incarnation.
    """

    restarts: int = 0
    takes: int = 2
    state: str = "running"
    refuses: str = ""
    asked: list[TargetJob] = field(default_factory=list)
    looks: int = 0
    closed: int = 0
    at_stop: Callable[[], None] = lambda: None

    async def inspect(self, job: TargetJob) -> JobSeen:
        """See `Target`."""
        self.looks += 1
        if self.state == "away":
            return JobSeen("unknown", "no connection")
        if int(job.scheduler.names["restarts"]) != self.restarts:
            return JobSeen("replaced", f"restart {self.restarts}")
        if self.asked and self.state == "running":
            self.takes -= 1
            self.state = "ended" if self.takes <= 0 else "running"
        return JobSeen("ended", "CANCELLED") if self.state == "ended" else JobSeen("running", "R")

    async def stop(self, job: TargetJob) -> StopAsked:
        """See `Target`."""
        if self.refuses:
            return StopAsked("refused", self.refuses)
        self.asked.append(job)
        self.at_stop()
        return StopAsked("accepted", "cancelled")

    async def close(self) -> None:
        """See `Target`."""
        self.closed += 1
