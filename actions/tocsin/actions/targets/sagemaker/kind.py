"""Training jobs of Amazon SageMaker.

A name is used once in an account and region, unless its job was deleted since. SageMaker may start
the same job again after a spot interruption: the transitions of its state show that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from tocsin.actions.receivers.aws import Service
from tocsin.actions.targets.answers import grace_problems, not_seen, why_another, word
from tocsin.actions.targets.aws import REGION, AwsJobs, Request
from tocsin.actions.targets.kind import JobSeen, TargetContext, TargetJob, TargetKind
from tocsin.actions.targets.sagemaker.config import SageMakerTarget
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.records.runs import SchedulerJob

GRACE: Final = timedelta(seconds=120)

_NAME: Final = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_ARN: Final = re.compile(
    rf"arn:aws[a-z-]*:sagemaker:(?P<region>{REGION}):[0-9]{{12}}:training-job/.+"
)
_ENDED: Final = frozenset({"Completed", "Failed", "Stopped", "Deleting"})
_STARTS_AGAIN: Final = frozenset({"Interrupted", "Restarting"})


class SageMaker(TargetKind[SageMakerTarget]):
    """Ends training jobs."""

    config = SageMakerTarget
    scheduler = "sagemaker"
    libraries = ("boto3",)

    def check(self, config: SageMakerTarget, loc: Loc) -> Iterator[Problem]:
        """A grace that SageMaker does not give."""
        yield from grace_problems(config, GRACE, "SageMaker kills a job after that, always", loc)

    def can_end(self, config: SageMakerTarget, scheduler: SchedulerJob) -> bool:
        """Jobs of the region, where one is configured."""
        return scheduler.kind == self.scheduler and config.region in (None, _region(scheduler))

    def target(self, name: str, config: SageMakerTarget, context: TargetContext) -> AwsJobs:
        """The training jobs of the account whose credentials this machine has."""
        return AwsJobs(TrainingJobs(), config.region)


def _region(scheduler: SchedulerJob) -> str | None:
    found = _ARN.fullmatch(scheduler.names.get("arn", ""))
    return None if found is None else found["region"]


class TrainingJobs:
    """What SageMaker is asked about a training job."""

    service: Service = "sagemaker"

    def region(self, scheduler: SchedulerJob) -> str | None:
        """The one in the job's ARN."""
        return _region(scheduler)

    def refused(self, job: TargetJob) -> str | None:
        """Without its exact name and its ARN, or when it started, it may be any job."""
        names = job.scheduler.names
        if not _NAME.fullmatch(names.get("job", "")) or _region(job.scheduler) is None:
            return "the run recorded no name and ARN of a training job"
        return None if job.started_ms else "the run recorded no start, so its job is not certain"

    def describe(self, job: TargetJob) -> Request:
        """By the exact name."""
        name = job.scheduler.names["job"]
        return lambda client: client.describe_training_job(TrainingJobName=name)

    def end(self, job: TargetJob) -> Request:
        """By the exact name."""
        name = job.scheduler.names["job"]
        return lambda client: client.stop_training_job(TrainingJobName=name)

    def is_ending(self, answer: Mapping[str, Any]) -> bool:
        """Whether it is stopping."""
        return answer.get("TrainingJobStatus") == "Stopping"

    def seen(self, job: TargetJob, answer: Mapping[str, Any]) -> JobSeen:
        """The state of the job, if it is this one: name, ARN and the time it was created."""
        names = job.scheduler.names
        # Names keep their case, and ARNs lose it.
        if (
            answer.get("TrainingJobName") != names["job"]
            or str(answer.get("TrainingJobArn")).lower() != names["arn"].lower()
        ):
            return not_seen("SageMaker shows a job with another name or ARN: another account?")
        why = why_another(_ms(answer.get("CreationTime")), job)
        if why is not None:
            return JobSeen("replaced", why)
        status = answer.get("TrainingJobStatus")
        state = word(status)
        if status in _ENDED:
            return JobSeen("ended", state)
        if status not in ("InProgress", "Stopping"):
            return not_seen(state)
        if status == "InProgress":
            secondary = word(answer.get("SecondaryStatus"))
            if secondary in _STARTS_AGAIN:
                return JobSeen("replaced", f"{secondary}: SageMaker starts the job again")
            transitions = answer.get("SecondaryStatusTransitions") or ()
            if why_another(_last_training_ms(transitions), job) is not None:
                return JobSeen("replaced", "SageMaker has started the job again since")
            state = f"{state}, {secondary}"
        return JobSeen("running", state)


def _last_training_ms(transitions: Sequence[Mapping[str, Any]]) -> int:
    """When the container was started last; 0 if it was not."""
    return max(
        (_ms(one.get("StartTime")) for one in transitions if one.get("Status") == "Training"),
        default=0,
    )


def _ms(time: object) -> int:
    return round(time.timestamp() * 1000) if isinstance(time, datetime) else 0
