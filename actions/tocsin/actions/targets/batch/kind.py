"""Jobs of AWS Batch.

An id is never used again. A retry strategy starts a job again under the same id, as its next
attempt; a job that was terminated is not retried. A child of an array job is `ID:INDEX`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from tocsin.actions.receivers.aws import Service
from tocsin.actions.targets.answers import grace_problems, not_seen, word
from tocsin.actions.targets.aws import REGION, AwsJobs, Request
from tocsin.actions.targets.batch.config import BatchTarget
from tocsin.actions.targets.kind import JobSeen, TargetContext, TargetJob, TargetKind
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.records.runs import SchedulerJob

GRACE: Final = timedelta(seconds=30)
REASON: Final = 1024
"""Characters of a reason, at most."""

_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(:[0-9]{1,5})?")
_WAITING: Final = frozenset({"SUBMITTED", "PENDING", "RUNNABLE"})
_ENDED: Final = frozenset({"SUCCEEDED", "FAILED"})


class Batch(TargetKind[BatchTarget]):
    """Ends jobs."""

    config = BatchTarget
    scheduler = "batch"
    libraries = ("boto3",)

    def check(self, config: BatchTarget, loc: Loc) -> Iterator[Problem]:
        """A grace that Batch does not give."""
        yield from grace_problems(config, GRACE, "Batch kills a job after that, always", loc)

    def can_end(self, config: BatchTarget, scheduler: SchedulerJob) -> bool:
        """Jobs of the region, where one is configured and one recorded."""
        here = config.region is None or _region(scheduler) in (None, config.region)
        return scheduler.kind == self.scheduler and here

    def target(self, name: str, config: BatchTarget, context: TargetContext) -> AwsJobs:
        """The jobs of the account whose credentials this machine has."""
        return AwsJobs(BatchJobs(), config.region)


class BatchJobs:
    """What Batch is asked about a job."""

    service: Service = "batch"

    def region(self, scheduler: SchedulerJob) -> str | None:
        """The one of the container, where it knows it."""
        return _region(scheduler)

    def refused(self, job: TargetJob) -> str | None:
        """Without its id and attempt, it may be another one."""
        names = job.scheduler.names
        if not _ID.fullmatch(names.get("job", "")):
            return "the run recorded no id of a Batch job"
        return None if _attempt(job) else "the run recorded no attempt of its Batch job"

    def describe(self, job: TargetJob) -> Request:
        """By the id."""
        job_id = job.scheduler.names["job"]
        return lambda client: client.describe_jobs(jobs=[job_id])

    def end(self, job: TargetJob) -> Request:
        """By the id, with the reason. Batch ends whatever attempt it then runs, and starts none."""
        job_id, reason = job.scheduler.names["job"], job.reason[:REASON]
        return lambda client: client.terminate_job(jobId=job_id, reason=reason)

    def is_ending(self, answer: Mapping[str, Any]) -> bool:
        """Whether it was terminated before."""
        return any(bool(one.get("isTerminated")) for one in answer.get("jobs", ()))

    def seen(self, job: TargetJob, answer: Mapping[str, Any]) -> JobSeen:
        """The state of the job, if Batch still runs this attempt of it."""
        found = [
            one for one in answer.get("jobs", ()) if one.get("jobId") == job.scheduler.names["job"]
        ]
        if len(found) != 1:
            return not_seen("Batch does not know the job: another account or region?")
        status, state = found[0].get("status"), word(found[0].get("status"))
        if status in _ENDED:
            return JobSeen("ended", state)
        if status not in _WAITING | {"STARTING", "RUNNING"}:
            return not_seen(state)
        if self.is_ending(answer):
            return JobSeen("running", f"{state}, terminated")
        attempts = found[0].get("attempts") or found[0].get("eksAttempts") or ()
        over = sum(one.get("stoppedAt") is not None for one in attempts)
        if over < _attempt(job):
            return JobSeen("running", state)
        return JobSeen(
            "replaced", f"{state}: attempt {_attempt(job)} has ended, {over + 1} follows"
        )


def _region(scheduler: SchedulerJob) -> str | None:
    region = scheduler.names.get("region", "")
    return region if re.fullmatch(REGION, region) else None


def _attempt(job: TargetJob) -> int:
    """From 1; 0 if none was recorded."""
    text = job.scheduler.names.get("attempt", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else 0
