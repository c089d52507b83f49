"""Jobs of AWS Batch, against botocore's Stubber and moto: this attempt, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from moto import mock_aws

from support.actions.target_jobs import target_job
from support.servers.stubbed_aws import StubbedAws
from support.waiting import wait_until
from tocsin.actions.targets.aws import AwsJobs
from tocsin.actions.targets.batch.config import BatchTarget
from tocsin.actions.targets.batch.kind import Batch, BatchJobs
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetJob
from tocsin.schemas.records.runs import SchedulerJob

ID = "4c6b1f5e-0d4b-4a5e-9a0e-6f1f2e3d4c5b"
REGION = "us-west-2"
JOB = target_job("batch", {"job": ID, "attempt": "1", "region": REGION})
SECOND = target_job("batch", {"job": ID, "attempt": "2", "region": REGION})
CHILD = target_job("batch", {"job": f"{ID}:17", "attempt": "1", "region": REGION})


def described(status: str, *, over: int = 0, terminated: bool = False, job: str = ID) -> Any:
    """An answer: so many attempts are over."""
    # Batch lists attempts that are over; were it to list the one that runs, it has no end.
    attempts = [{"startedAt": 1, "stoppedAt": 2, "statusReason": "exit 79"}] * over
    attempts = [*attempts, {"startedAt": 3}] if status == "RUNNING" and over else attempts
    return {
        "jobs": [
            {
                "jobName": "train",
                "jobId": job,
                "jobQueue": "q",
                "status": status,
                "startedAt": 1,
                "jobDefinition": "d",
                "attempts": attempts,
                "isTerminated": terminated,
            }
        ]
    }


async def test_a_job_is_terminated_with_the_reason_and_followed_until_it_has_failed() -> None:
    aws = StubbedAws("batch")
    jobs = AwsJobs(BatchJobs(), None, aws)
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING"))
    aws.answer("terminate_job", {"jobId": ID, "reason": JOB.reason})
    assert await jobs.stop(JOB) == StopAsked("accepted", "asked to end it")

    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING", terminated=True))
    assert await jobs.inspect(JOB) == JobSeen("running", "RUNNING, terminated")
    # An attempt after one whose answer was lost asks for nothing a second time.
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING", terminated=True))
    assert await jobs.stop(JOB) == StopAsked("accepted", "RUNNING, terminated")
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("FAILED", over=1, terminated=True))
    assert await jobs.inspect(JOB) == JobSeen("ended", "FAILED")

    aws.done()
    assert set(aws.regions) == {REGION}


async def test_a_child_of_an_array_is_terminated_alone() -> None:
    aws, child = StubbedAws("batch"), f"{ID}:17"
    aws.answer("describe_jobs", {"jobs": [child]}, **described("RUNNING", job=child))
    aws.answer("terminate_job", {"jobId": child, "reason": CHILD.reason})
    assert (await AwsJobs(BatchJobs(), None, aws).stop(CHILD)).result == "accepted"
    aws.done()


@pytest.mark.parametrize("status", ["RUNNABLE", "STARTING", "RUNNING"])
async def test_the_next_attempt_goes_on(status: str) -> None:
    aws = StubbedAws("batch")
    aws.answer("describe_jobs", {"jobs": [ID]}, **described(status, over=1))
    asked = await AwsJobs(BatchJobs(), None, aws).stop(JOB)

    assert asked == StopAsked("refused", f"{status}: attempt 1 has ended, 2 follows")
    aws.done()


async def test_the_second_attempt_is_ended_where_it_is_meant() -> None:
    aws = StubbedAws("batch")
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING", over=1))
    aws.answer("terminate_job", {"jobId": ID, "reason": SECOND.reason})
    assert (await AwsJobs(BatchJobs(), None, aws).stop(SECOND)).result == "accepted"
    aws.done()


async def test_a_job_that_ends_between_look_and_termination_has_ended() -> None:
    aws = StubbedAws("batch")
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING"))
    aws.refuse("terminate_job", {"jobId": ID, "reason": JOB.reason}, "ClientException", 400)
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("SUCCEEDED", over=1))
    asked = await AwsJobs(BatchJobs(), None, aws).stop(JOB)
    assert asked == StopAsked("accepted", "there was nothing left to end: SUCCEEDED")
    aws.done()


@pytest.mark.parametrize(
    "answer", [{"jobs": []}, described("RUNNING", job=f"{ID}:1"), described("DREAMING")]
)
async def test_a_job_that_batch_does_not_show_is_unknown(answer: Any) -> None:
    aws = StubbedAws("batch")
    jobs = AwsJobs(BatchJobs(), None, aws)
    aws.answer("describe_jobs", {"jobs": [ID]}, **answer)
    assert (await jobs.inspect(JOB)).state == "unknown"
    aws.answer("describe_jobs", {"jobs": [ID]}, **answer)
    assert (await jobs.stop(JOB)).result == "failed"
    aws.done()


async def test_a_long_reason_is_cut_to_what_batch_takes() -> None:
    aws, long = StubbedAws("batch"), replace(JOB, reason="x" * 2000)
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING"))
    aws.answer("terminate_job", {"jobId": ID, "reason": "x" * 1024})
    assert (await AwsJobs(BatchJobs(), None, aws).stop(long)).result == "accepted"


@pytest.mark.parametrize(
    "job",
    [
        target_job("batch", {"job": ID}),
        target_job("batch", {"job": ID, "attempt": "two"}),
        target_job("batch", {"job": "train", "attempt": "1"}),
        target_job("batch", {"job": f"{ID}#0", "attempt": "1"}),
        target_job("batch", {"attempt": "1"}),
    ],
)
async def test_names_that_identify_no_attempt_are_asked_of_nobody(job: TargetJob) -> None:
    aws = StubbedAws("batch")
    jobs = AwsJobs(BatchJobs(), None, aws)
    assert (await jobs.inspect(job)).state == "unknown"
    assert (await jobs.stop(job)).result == "refused"
    assert aws.regions == []


@pytest.mark.parametrize(
    ("configured", "recorded", "used"),
    [
        (None, REGION, REGION),
        ("eu-central-1", None, "eu-central-1"),
        (None, None, None),
        # Our signature must reach no host that a run made up.
        (None, "x.evil.example/", None),
    ],
)
async def test_the_region_is_the_configured_one_or_the_recorded(
    configured: str | None, recorded: str | None, used: str | None
) -> None:
    aws = StubbedAws("batch")
    names = {"job": ID, "attempt": "1"} | ({"region": recorded} if recorded else {})
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING"))
    await AwsJobs(BatchJobs(), configured, aws).inspect(target_job("batch", names))
    assert aws.regions == [used]


def test_what_can_be_configured() -> None:
    kind = Batch()
    assert not list(kind.check(BatchTarget(type="batch"), ("targets", "a")))
    longer = BatchTarget.model_validate({"type": "batch", "grace": "31s"})
    [problem] = kind.check(longer, ("targets", "a"))
    assert problem.message == "expected at most 30s: Batch kills a job after that, always"
    for region, ends in ((None, True), (REGION, True), ("us-east-1", False)):
        assert kind.can_end(BatchTarget(type="batch", region=region), JOB.scheduler) is ends
    assert not kind.can_end(BatchTarget(type="batch"), SchedulerJob(kind="sagemaker"))


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The Batch of moto, whose jobs run in no container: until they are terminated."""
    from moto.batch.models import Job

    def run(job: Any) -> None:
        job.status = "RUNNING"
        wait_until(lambda: job.stop)
        job._mark_stopped(success=False)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "planted-SECRET-aws")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(Job, "run", run)
    with mock_aws():
        client = boto3.client("batch", region_name=REGION)
        trust = "arn:aws:iam::123456789012:role/batch"
        boto3.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")
        client.create_compute_environment(
            computeEnvironmentName="env", type="UNMANAGED", state="ENABLED", serviceRole=trust
        )
        order = [{"order": 0, "computeEnvironment": "env"}]
        client.create_job_queue(
            jobQueueName="queue", state="ENABLED", priority=1, computeEnvironmentOrder=order
        )
        container = {"image": "busybox", "vcpus": 1, "memory": 128, "command": ["sleep", "9"]}
        client.register_job_definition(
            jobDefinitionName="train", type="container", containerProperties=container
        )
        yield client


@pytest.mark.torture  # moto imports all of IAM
async def test_a_job_of_another_implementation_ends_and_its_neighbour_goes_on(batch: Any) -> None:
    ids = [
        batch.submit_job(jobName="train", jobQueue="queue", jobDefinition="train")["jobId"]
        for _ in range(2)
    ]
    mine, other = (
        target_job("batch", {"job": one, "attempt": "1", "region": REGION}) for one in ids
    )
    jobs = AwsJobs(BatchJobs(), None)
    for each in (mine, other):
        await seen_as(jobs, each, "RUNNING")
    assert await jobs.stop(mine) == StopAsked("accepted", "asked to end it")
    assert await seen_as(jobs, mine, "FAILED") == JobSeen("ended", "FAILED")
    (found,) = batch.describe_jobs(jobs=[ids[0]])["jobs"]
    assert found["statusReason"] == mine.reason
    assert await jobs.stop(mine) == StopAsked("accepted", "there was nothing left to end: FAILED")
    assert await jobs.inspect(other) == JobSeen("running", "RUNNING")
    unknown = target_job("batch", {"job": ID, "attempt": "1", "region": REGION})
    assert (await jobs.stop(unknown)).result == "failed"
    assert (await jobs.inspect(other)).state == "running"
    await jobs.stop(other)


async def seen_as(jobs: AwsJobs, job: TargetJob, status: str) -> JobSeen:
    """Look until the job has that status."""
    async with asyncio.timeout(60):
        found = await jobs.inspect(job)
        while found.reason != status:
            await asyncio.sleep(0.02)
            found = await jobs.inspect(job)
    return found
