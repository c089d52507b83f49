"""Slurm as a target: exactly one incarnation of a job is ended, and not queued again."""

from __future__ import annotations

from tocsin.actions.targets.answers import instead, not_seen
from tocsin.actions.targets.kind import (
    JobSeen,
    StopAsked,
    Target,
    TargetContext,
    TargetJob,
    TargetKind,
)
from tocsin.actions.targets.slurm.commands import Commands
from tocsin.actions.targets.slurm.config import SlurmTarget
from tocsin.actions.targets.slurm.controller import Controller
from tocsin.actions.targets.slurm.jobs import WantedJob, parts_of, seen, wanted_job
from tocsin.actions.targets.slurm.rest import rest_controller


class Slurm(TargetKind[SlurmTarget]):
    """Ends jobs of one Slurm cluster."""

    config = SlurmTarget
    scheduler = "slurm"
    libraries = ("aiohttp",)

    def target(self, name: str, config: SlurmTarget, context: TargetContext) -> Target:
        """The cluster of this machine's `slurm.conf`, or that of a slurmrestd."""
        if config.rest is None:
            return SlurmCluster(Commands(name, context.environ))
        return SlurmCluster(rest_controller(name, config.rest, context))


class SlurmCluster:
    """One cluster."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def inspect(self, job: TargetJob) -> JobSeen:
        """Show what the cluster lists of the job."""
        try:
            wanted = wanted_job(job.scheduler)
        except ValueError as error:
            return not_seen(str(error))
        found, _ = await self._inspect(job, wanted)
        return found

    async def stop(self, job: TargetJob) -> StopAsked:
        """Forbid to queue the job again, look once more, and cancel it.

        In this order, because Slurm's own calls name no incarnation: a job that may not be queued
        again cannot become another one between the look and the end. Nor does a script whose trap
        requeues it come back: it would survive a plain `scancel`.
        """
        try:
            wanted = wanted_job(job.scheduler)
        except ValueError as error:
            return StopAsked("refused", str(error))
        before, requeue = await self._inspect(job, wanted)
        if before.state != "running":
            return instead(before)
        if requeue:
            asked = await self._controller.set_requeue(wanted.called, allowed=False)
            if asked.result != "accepted":
                return asked
            now, requeue = await self._inspect(job, wanted)
            if now.state == "replaced":
                # It was queued again meanwhile, and this one must go on as its owner wants.
                await self._controller.set_requeue(wanted.called, allowed=True)
            if now.state != "running":
                return instead(now)
            if requeue:
                return StopAsked("refused", "Slurm still allows a requeue of the job")
        return await self._controller.cancel(wanted.called)

    async def close(self) -> None:
        """Close the connections."""
        await self._controller.close()

    async def _inspect(self, job: TargetJob, wanted: WantedJob) -> tuple[JobSeen, bool]:
        """What is seen of the job, and whether it may be queued again."""
        listing = await self._controller.jobs(wanted.called)
        if listing.failure:
            return not_seen(listing.failure), False
        if listing.cluster and listing.cluster != wanted.cluster:
            return not_seen("the job runs on another cluster of Slurm"), False
        found = seen(job, wanted, listing.jobs)
        if found is not None:
            return found, any(part.requeue for part in parts_of(wanted, listing.jobs))
        if listing.cluster and listing.all_shown:
            return JobSeen("ended", "the controller lists it no more"), False
        return not_seen("not listed: it ended long ago, or is hidden from us"), False
