"""Which of the jobs that Slurm lists is the wanted one; `answers` are those of Slurm 22.05."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.actions.target_jobs import target_job
from tocsin.actions.targets.kind import JobSeen
from tocsin.actions.targets.slurm.commands import read_config, read_jobs
from tocsin.actions.targets.slurm.jobs import ListedJob, seen, wanted_job
from tocsin.schemas.records.runs import SchedulerJob

ANSWERS = Path(__file__).parent / "answers"


def listed(name: str) -> tuple[ListedJob, ...]:
    return read_jobs((ANSWERS / f"squeue-{name}.txt").read_text())


def look(
    jobs: tuple[ListedJob, ...], job: int, *, restarts: int = 0, task: str = "", started_ms: int = 0
) -> JobSeen | None:
    names = {"job": str(job), "restarts": str(restarts), "cluster": "tests"}
    if task:
        names |= {"array_job": task.partition("_")[0], "array_task": task.partition("_")[2]}
    wanted = target_job("slurm", names, started_ms=started_ms)
    return seen(wanted, wanted_job(wanted.scheduler), jobs)


def test_what_squeue_prints_is_read_by_its_columns() -> None:
    # Its owner has called it "x State=COMPLETED Requeue=0".
    assert listed("running") == (
        ListedJob(
            job=3,
            restarts=0,
            states=("RUNNING",),
            requeue=True,
            started_s=listed("running")[0].started_s,
        ),
    )
    assert [job.array_task for job in listed("array")] == [-1, 1, 0]
    assert [job.het_job for job in listed("het")] == [7, 7]
    with pytest.raises(ValueError, match="zip"):
        read_jobs("3 RUNNING\n")
    config = read_config((ANSWERS / "scontrol-config.txt").read_text())
    assert (config["ClusterName"], config["PrivateData"]) == ("tests", "none")


def test_the_incarnation_counts_and_not_the_job_id_alone() -> None:
    assert look(listed("running"), 3) == JobSeen("running", "RUNNING")
    assert look(listed("running"), 3, restarts=1) == JobSeen(
        "replaced", "RUNNING, restart 0 and not 1"
    )
    assert look(listed("requeued"), 3) == JobSeen("replaced", "PENDING, restart 1 and not 0")
    assert look(listed("requeued"), 3, restarts=1) == JobSeen("running", "PENDING")
    assert look((), 3) is None


def test_a_job_that_was_started_after_the_training_is_another_one() -> None:
    started_ms = listed("running")[0].started_s * 1000
    assert look(listed("running"), 3, started_ms=started_ms + 5000) == JobSeen("running", "RUNNING")
    assert look(listed("running"), 3, started_ms=started_ms - 3_600_000) == JobSeen(
        "replaced", "it began 3,600 s after this training: another job with that name"
    )


def test_a_task_of_an_array_is_never_its_siblings() -> None:
    assert look(listed("array"), 5, task="4_0") == JobSeen("running", "RUNNING")
    # The array's id is that of the tasks that wait, of the last task, and of no other.
    assert look(listed("array"), 4) == JobSeen("replaced", "another job is called 4")
    assert look(listed("array"), 5) == JobSeen("replaced", "another job is called 5")
    assert look(listed("array"), 5, task="4_1") == JobSeen("replaced", "another job is called 4_1")
    assert (
        wanted_job(
            SchedulerJob(
                kind="slurm",
                names={"job": "5", "cluster": "c", "array_job": "4", "array_task": "0"},
            )
        ).called
        == "4_0"
    )


def test_a_heterogeneous_job_ends_with_its_last_part() -> None:
    assert look(listed("het"), 7) == JobSeen("running", "RUNNING")
    first, second = listed("het-cancelled")
    assert look((first, second), 1) == JobSeen("ended", "CANCELLED")
    assert look((first, replace(second, states=("COMPLETING",))), 1) == JobSeen(
        "running", "COMPLETING"
    )


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("COMPLETED",), "ended"),
        (("NODE_FAIL",), "ended"),
        (("CANCELLED", "COMPLETING"), "running"),
        (("REVOKED",), "running"),
        ((), "running"),
        (("COMPLETED; rm -rf /",), "running"),
    ],
)
def test_only_an_end_is_an_end(states: tuple[str, ...], state: str) -> None:
    found = look((ListedJob(job=3, restarts=0, states=states, requeue=True),), 3)
    assert found is not None
    assert found.state == state
    assert "rm" not in found.reason


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ({"cluster": "c"}, "no Slurm job id"),
        ({"job": "0", "cluster": "c"}, "no Slurm job id"),
        ({"job": "4711"}, "no name of its Slurm cluster"),
        ({"job": "--all", "cluster": "c"}, "as the job of Slurm, expected digits"),
        ({"job": "1 2", "cluster": "c"}, "as the job of Slurm, expected digits"),
        (
            {"job": "1", "cluster": "c", "restarts": "x"},
            "as the restarts of Slurm, expected digits",
        ),
        ({"job": "1", "cluster": "c", "array_job": "1"}, "only a part"),
        ({"job": "1", "cluster": "c", "array_task": "1"}, "only a part"),
    ],
)
def test_names_that_do_not_tell_one_job_are_refused(names: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        wanted_job(SchedulerJob(kind="slurm", names=names))
