"""What the environment of a job tells of its scheduler."""

from __future__ import annotations

import json

import pytest

from tocsin.emitter.process.scheduler import scheduler_of
from tocsin.schemas.records.runs import MAX_SCHEDULER_NAME, SchedulerJob


def test_outside_of_a_scheduler_there_is_no_job() -> None:
    assert scheduler_of({}) is None
    assert scheduler_of({"SLURM_JOB_ID": "", "SLURM_RESTART_COUNT": "2"}) is None


def test_a_job_of_slurm_is_named_by_its_id_and_how_often_it_was_started_again() -> None:
    assert scheduler_of({"SLURM_JOB_ID": "4711"}) == SchedulerJob(
        kind="slurm", names={"job": "4711", "restarts": "0"}
    )
    array = {
        "SLURM_JOB_ID": "4713",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_CLUSTER_NAME": "a100",
        "SLURM_ARRAY_JOB_ID": "4711",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "",
    }
    assert scheduler_of(array) == SchedulerJob(
        kind="slurm",
        names={
            "job": "4713",
            "restarts": "2",
            "cluster": "a100",
            "array_job": "4711",
            "array_task": "2",
        },
    )
    parts = {"SLURM_JOB_ID": "9", "SLURM_JOB_ID_HET_GROUP_0": "9", "SLURM_JOB_ID_HET_GROUP_1": "10"}
    assert scheduler_of(parts) == SchedulerJob(
        kind="slurm", names={"job": "9", "restarts": "0", "het_job": "9"}
    )


def test_a_scheduler_of_your_own_is_set_by_hand() -> None:
    environ = {"SLURM_JOB_ID": "7", "TOCSIN_SCHEDULER": "lab:job=17, start=2"}
    assert scheduler_of(environ) == SchedulerJob(kind="lab", names={"job": "17", "start": "2"})
    for wrong in ("lab", "lab:", ":job=1", "lab:job", f"{'k' * 33}:job=1"):
        assert scheduler_of({"TOCSIN_SCHEDULER": wrong}) is None


def test_what_no_scheduler_can_have_given_is_left_out() -> None:
    long = "1" * (MAX_SCHEDULER_NAME + 1)
    assert scheduler_of({"SLURM_JOB_ID": long}) is None
    job = scheduler_of({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": long})
    assert job is not None
    assert set(job.names) == {"job", "restarts"}
    unreadable = scheduler_of({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a\udc80"})
    assert unreadable is not None
    assert set(unreadable.names) == {"job", "restarts"}


ARN = "arn:aws:sagemaker:eu-central-1:123456789012:training-job/run-1"


def test_a_training_job_of_sagemaker_is_named_by_its_exact_name_and_its_arn() -> None:
    environ = {"TRAINING_JOB_NAME": "Run-1", "TRAINING_JOB_ARN": ARN}
    names = {"job": "Run-1", "arn": ARN}
    assert scheduler_of(environ) == SchedulerJob(kind="sagemaker", names=names)
    assert scheduler_of({**environ, "AWS_REGION": "eu-central-1"}) == SchedulerJob(
        kind="sagemaker", names={**names, "region": "eu-central-1"}
    )
    # Local mode: SageMaker has no such job.
    assert scheduler_of({"TRAINING_JOB_NAME": "Run-1"}) is None


@pytest.mark.parametrize(
    ("found", "job"), [("4c6b", "4c6b"), ("4c6b:17", "4c6b:17"), ("4c6b#1", "4c6b")]
)
def test_a_job_of_batch_is_named_by_its_id_and_attempt(found: str, job: str) -> None:
    environ = {"AWS_BATCH_JOB_ID": found, "AWS_BATCH_JOB_ATTEMPT": "2", "AWS_REGION": "us-west-2"}
    names = {"job": job, "attempt": "2", "region": "us-west-2"}
    assert scheduler_of(environ) == SchedulerJob(kind="batch", names=names)


def test_a_job_of_ray_is_named_by_its_submission() -> None:
    metadata = {"job_submission_id": "raysubmit_Ab12", "job_name": "x"}
    driver = {
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {}, "metadata": metadata}),
        "RAY_ADDRESS": "10.0.0.1:6379",
    }
    assert scheduler_of(driver) == SchedulerJob(
        kind="ray", names={"submission": "raysubmit_Ab12", "address": "10.0.0.1:6379"}
    )
    assert scheduler_of({"RAY_JOB_ID": "02000000"}) == SchedulerJob(
        kind="ray", names={"job": "02000000"}
    )
    # Ray in an allocation of Slurm ends the job without ending the cluster.
    inner = scheduler_of({**driver, "SLURM_JOB_ID": "4711"})
    assert inner is not None
    assert inner.kind == "ray"
    # An address alone is where somebody would submit to.
    assert scheduler_of({"RAY_ADDRESS": "http://ray:8265"}) is None


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"metadata": []}',
        '{"metadata": {"job_submission_id": 7}}',
        '{"metadata": {"job_submission_id": "\\ud800"}}',
        '{"metadata": {}}',
    ],
)
def test_a_job_configuration_that_cannot_be_read_is_none(config: str) -> None:
    assert scheduler_of({"RAY_JOB_CONFIG_JSON_ENV_VAR": config}) is None


def test_a_pod_is_one_of_kubernetes_unless_slurm_runs_in_it() -> None:
    pod = {"TOCSIN_POD_UID": "6f0c2a9e-1b2c-4d3e-8f90-a1b2c3d4e5f6"}
    found = scheduler_of(pod)
    assert found is not None
    assert (found.kind, found.names["pod_uid"]) == ("kubernetes", pod["TOCSIN_POD_UID"])
    inner = scheduler_of(pod | {"SLURM_JOB_ID": "4711"})
    assert inner is not None
    assert inner.kind == "slurm"
