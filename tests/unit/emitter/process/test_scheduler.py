"""What the environment of a job tells of its scheduler."""

from __future__ import annotations

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
        "SLURM_HET_JOB_ID": "",
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


def test_what_no_scheduler_can_have_given_is_left_out() -> None:
    long = "1" * (MAX_SCHEDULER_NAME + 1)
    assert scheduler_of({"SLURM_JOB_ID": long}) is None
    job = scheduler_of({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": long})
    assert job is not None
    assert set(job.names) == {"job", "restarts"}
