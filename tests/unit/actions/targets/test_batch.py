"""Jobs of AWS Batch, against botocore's Stubber: this attempt, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.stubbed_aws import StubbedAws
from support.target_jobs import target_job
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
    assert await jobs.look(JOB) == JobSeen("running", "RUNNING, terminated")
    # An attempt after one whose answer was lost asks for nothing a second time.
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("RUNNING", terminated=True))
    assert await jobs.stop(JOB) == StopAsked("accepted", "RUNNING, terminated")
    aws.answer("describe_jobs", {"jobs": [ID]}, **described("FAILED", over=1, terminated=True))
    assert await jobs.look(JOB) == JobSeen("ended", "FAILED")

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

    assert asked == StopAsked("refused", f"{status}: attempt 1 is over, 2 follows")
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
    assert asked == StopAsked("accepted", "nothing was left to end: SUCCEEDED")
    aws.done()


@pytest.mark.parametrize(
    "answer", [{"jobs": []}, described("RUNNING", job=f"{ID}:1"), described("DREAMING")]
)
async def test_a_job_that_batch_does_not_show_is_unknown(answer: Any) -> None:
    aws = StubbedAws("batch")
    jobs = AwsJobs(BatchJobs(), None, aws)
    aws.answer("describe_jobs", {"jobs": [ID]}, **answer)
    assert (await jobs.look(JOB)).state == "unknown"
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
    assert (await jobs.look(job)).state == "unknown"
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
    await AwsJobs(BatchJobs(), configured, aws).look(target_job("batch", names))
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
