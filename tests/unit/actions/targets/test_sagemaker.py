"""SageMaker training jobs, against botocore's Stubber: the right one, and no other."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.actions.target_jobs import STARTED_MS, target_job
from support.servers.stubbed_aws import SECRET, StubbedAws
from tocsin.actions.targets.aws import AwsJobs
from tocsin.actions.targets.kind import JobSeen, StopAsked
from tocsin.actions.targets.sagemaker.config import SageMakerTarget
from tocsin.actions.targets.sagemaker.kind import SageMaker, TrainingJobs
from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.records.runs import SchedulerJob

NAME = "Run-1"
# SageMaker writes names of ARNs in lower case.
ARN = "arn:aws:sagemaker:eu-central-1:123456789012:training-job/run-1"
JOB = target_job("sagemaker", {"job": NAME, "arn": ARN})
ASKED = {"TrainingJobName": NAME}
START = datetime.fromtimestamp(STARTED_MS / 1000, UTC)


def described(
    status: str,
    secondary: str = "Training",
    *,
    created: timedelta = timedelta(minutes=-5),
    trainings: tuple[timedelta, ...] = (timedelta(seconds=-10),),
    **others: Any,
) -> dict[str, Any]:
    """An answer; times are from the start of the training."""
    return {
        "TrainingJobName": NAME,
        "TrainingJobArn": ARN,
        "ModelArtifacts": {"S3ModelArtifacts": "s3://x"},
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": START + created,
        "SecondaryStatusTransitions": [
            {"Status": "Training", "StartTime": START + after} for after in trainings
        ],
    } | others


async def test_a_job_is_stopped_by_its_exact_name_and_followed_until_stopped() -> None:
    aws = StubbedAws("sagemaker")
    jobs = AwsJobs(TrainingJobs(), None, aws)
    aws.answer("describe_training_job", ASKED, **described("InProgress"))
    aws.answer("stop_training_job", ASKED)
    assert await jobs.stop(JOB) == StopAsked("accepted", "asked to end it")

    aws.answer("describe_training_job", ASKED, **described("Stopping", "Stopping"))
    assert await jobs.inspect(JOB) == JobSeen("running", "Stopping")
    # An attempt after one whose answer was lost asks for nothing a second time.
    aws.answer("describe_training_job", ASKED, **described("Stopping", "Stopping"))
    assert await jobs.stop(JOB) == StopAsked("accepted", "Stopping")
    aws.answer("describe_training_job", ASKED, **described("Stopped", "Stopped"))
    assert await jobs.inspect(JOB) == JobSeen("ended", "Stopped")

    aws.done()
    assert set(aws.regions) == {"eu-central-1"}


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (described("InProgress", created=timedelta(minutes=2)), "replaced"),
        (described("InProgress", trainings=(timedelta(0), timedelta(minutes=9))), "replaced"),
        (described("InProgress", "Interrupted"), "replaced"),
        (described("InProgress", "Restarting"), "replaced"),
        (described("Stopped", created=timedelta(minutes=2)), "replaced"),
        (described("InProgress", TrainingJobName="run-1"), "unknown"),
        (described("InProgress", TrainingJobName="Run-1-retry"), "unknown"),
        (described("InProgress", TrainingJobArn=ARN.replace("1234", "9999")), "unknown"),
        (described("Paused by " + SECRET), "unknown"),
    ],
)
async def test_another_job_goes_on(answer: dict[str, Any], state: str) -> None:
    aws = StubbedAws("sagemaker")
    jobs = AwsJobs(TrainingJobs(), None, aws)
    # The Stubber knows no stop: to ask for one would be an error.
    aws.answer("describe_training_job", ASKED, **answer)
    seen = await jobs.inspect(JOB)
    aws.answer("describe_training_job", ASKED, **answer)
    asked = await jobs.stop(JOB)

    assert seen.state == state
    assert asked.result == ("refused" if state == "replaced" else "failed")
    assert SECRET not in seen.reason + asked.reason
    aws.done()


@pytest.mark.parametrize("status", ["Completed", "Failed", "Stopped", "Deleting"])
async def test_a_job_that_ended_before_is_left_alone(status: str) -> None:
    aws = StubbedAws("sagemaker")
    aws.answer("describe_training_job", ASKED, **described(status, "Completed"))
    asked = await AwsJobs(TrainingJobs(), None, aws).stop(JOB)

    assert asked == StopAsked("accepted", f"there was nothing left to end: {status}")
    aws.done()


async def test_a_job_that_ends_between_look_and_stop_has_ended() -> None:
    aws = StubbedAws("sagemaker")
    aws.answer("describe_training_job", ASKED, **described("InProgress"))
    aws.refuse("stop_training_job", ASKED, "ValidationException", 400)
    aws.answer("describe_training_job", ASKED, **described("Completed", "Completed"))
    asked = await AwsJobs(TrainingJobs(), None, aws).stop(JOB)

    assert asked == StopAsked("accepted", "there was nothing left to end: Completed")
    aws.done()


async def test_a_job_that_is_not_there_is_unknown_and_never_ended() -> None:
    aws = StubbedAws("sagemaker")
    jobs = AwsJobs(TrainingJobs(), None, aws)
    aws.refuse("describe_training_job", ASKED, "ResourceNotFound", 400)
    assert await jobs.inspect(JOB) == JobSeen("unknown", "400 ResourceNotFound")


@pytest.mark.parametrize(
    ("code", "status", "result"),
    [
        ("ThrottlingException", 400, "failed"),
        ("InternalFailure", 500, "failed"),
        ("ExpiredTokenException", 400, "failed"),
        ("AccessDeniedException", 400, "refused"),
    ],
)
async def test_a_refusal_is_final_unless_it_says_later(code: str, status: int, result: str) -> None:
    aws = StubbedAws("sagemaker")
    aws.answer("describe_training_job", ASKED, **described("InProgress"))
    aws.refuse("stop_training_job", ASKED, code, status)
    if result == "refused":
        aws.answer("describe_training_job", ASKED, **described("InProgress"))
    asked = await AwsJobs(TrainingJobs(), None, aws).stop(JOB)

    assert (asked.result, asked.reason) == (result, f"{status} {code}")
    aws.done()


@pytest.mark.parametrize(
    "job",
    [
        target_job("sagemaker", {"job": NAME}),
        target_job("sagemaker", {"arn": ARN}),
        target_job("sagemaker", {"job": "run 1*", "arn": ARN}),
        target_job(
            "sagemaker", {"job": NAME, "arn": ARN.replace("eu-central-1", "x.evil.example")}
        ),
        replace(JOB, started_ms=0),
    ],
)
async def test_names_that_identify_no_job_are_asked_of_nobody(job: Any) -> None:
    aws = StubbedAws("sagemaker")
    jobs = AwsJobs(TrainingJobs(), None, aws)

    assert (await jobs.inspect(job)).state == "unknown"
    assert (await jobs.stop(job)).result == "refused"
    assert aws.regions == []


async def test_a_machine_without_credentials_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    seen = await AwsJobs(TrainingJobs(), None).inspect(JOB)

    assert seen == JobSeen("unknown", "no AWS credentials were found on this machine")


def test_the_grace_is_what_sagemaker_gives() -> None:
    kind = SageMaker()
    assert SageMakerTarget(type="sagemaker").grace == timedelta(seconds=120)
    assert not list(kind.check(SageMakerTarget(type="sagemaker"), ("targets", "a")))
    longer = SageMakerTarget.model_validate({"type": "sagemaker", "grace": "3m"})
    assert list(kind.check(longer, ("targets", "a"))) == [
        Problem(
            ("targets", "a", "grace"),
            "expected at most 2m: SageMaker kills a job after that, always",
            hint="grace: 2m",
        )
    ]


def test_a_region_that_is_configured_is_the_only_one() -> None:
    kind, job = SageMaker(), JOB.scheduler
    for region, ends in ((None, True), ("eu-central-1", True), ("us-east-1", False)):
        assert kind.can_end(SageMakerTarget(type="sagemaker", region=region), job) is ends
    assert not kind.can_end(SageMakerTarget(type="sagemaker"), SchedulerJob(kind="batch"))
