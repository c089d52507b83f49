"""Which run, job and incarnation a process speaks for, by what schedulers and launchers say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tocsin.console.services.launch import RunOptions, launch_options
from tocsin.emitter.launch import in_process
from tocsin.emitter.process.environment import JOB_ID, RUNTIME_DIR
from tocsin.emitter.process.identity import (
    Identity,
    identify,
    launch_job_id,
    rank_of,
    resolve_job_id,
    scheduler_job,
)
from tocsin.schemas.configuration.file import load_config
from tocsin.schemas.ids import incarnation_id

SLURM = {"SLURM_JOB_ID": "4711"}


def of(environ: dict[str, str], rank: int = 0) -> Identity:
    return identify(environ, rank=rank, local_rank=rank, world_size=2)


def test_two_launches_in_one_allocation_are_two_incarnations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {**SLURM, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    launches = [launch_options(["true"], RunOptions(), environ) for _ in range(2)]
    assert {options.run_id for options in launches} == {"slurm-4711"}
    firsts = {incarnation_id(options.run_id, options.job_id, 0, 0) for options in launches}
    assert len(firsts) == 2
    # The helper, which says who is sampled, is told the same as the launcher goes by.
    for options in launches:
        assert incarnation_id(options.run_id, options.job_id, 0, 0) in options.helper
        assert options.job_id.startswith("slurm-4711/")


def test_what_was_handed_down_holds_below_its_launcher_and_not_for_another() -> None:
    handed = {**SLURM, JOB_ID: "slurm-4711/a"}
    assert resolve_job_id(handed) == "slurm-4711/a"
    # By hand, for launchers on several nodes.
    assert launch_job_id(handed) == "slurm-4711/a"
    nested = {launch_job_id({**handed, "TOCSIN_LAUNCHER": "/x/launcher.sock"}) for _ in range(2)}
    assert len(nested) == 2
    assert "slurm-4711/a" not in nested


def test_tasks_of_a_slurm_step_count_their_launches_alike(short_path: Path) -> None:
    def launches(step: int) -> list[tuple[str, str]]:
        tasks = [
            {
                **SLURM, "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_NODEID": str(task), "SLURM_PROCID": str(task),
                "XDG_RUNTIME_DIR": str(short_path / str(task)),
            }
            for task in range(2)
        ]  # fmt: skip
        return [(launch_job_id(tasks[0]), launch_job_id(tasks[1])) for _ in range(2)]

    for task in range(2):
        (short_path / str(task)).mkdir()
    found = [pair for step in (0, 1) for pair in launches(step)]
    assert all(first == second for first, second in found)
    assert len(set(found)) == 4


def test_the_launches_of_steps_that_are_long_over_are_removed(short_path: Path) -> None:
    def launch(step: int) -> str:
        return launch_job_id({
            **SLURM, "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NODEID": "0", "SLURM_PROCID": "0", "XDG_RUNTIME_DIR": str(short_path),
        })  # fmt: skip

    def age() -> list[Path]:
        launches = [path for path in short_path.rglob("launch-*") if path.is_file()]
        for path in launches:
            os.utime(path, (1e9, 1e9))
        return launches

    first = launch(0)
    (old,) = age()
    assert launch(1) != first
    assert not old.exists()
    age()
    # A step that goes on counts on, however old its first launch is.
    assert launch(1).endswith("1.1")
    assert len(age()) == 2


def test_a_slurm_step_of_one_task_needs_no_count() -> None:
    environ = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert launch_job_id(environ) != launch_job_id(environ)


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"HOSTNAME": "train-3", "JOB_COMPLETION_INDEX": "3"}, "k8s-train"),
        ({"HOSTNAME": "train-0-x7k2p", "JOB_COMPLETION_INDEX": "0"}, "k8s-train"),
        ({"HOSTNAME": "bert-large-master-0"}, "k8s-bert-large"),
        ({"HOSTNAME": "bert-large-worker-12"}, "k8s-bert-large"),
        ({"HOSTNAME": "llm-node-0-3"}, "k8s-llm"),
        ({"HOSTNAME": "llm-node-0-3-abcde"}, "k8s-llm"),
        # The Jobs of a JobSet are indexed ones.
        ({"HOSTNAME": "llm-node-0-3", "JOB_COMPLETION_INDEX": "3"}, "k8s-llm"),
        ({"HOSTNAME": "my-llm-node-12-0-abcde", "JOB_COMPLETION_INDEX": "0"}, "k8s-my-llm"),
        ({"HOSTNAME": "llm-worker-3", "JOB_COMPLETION_INDEX": "3"}, "k8s-llm-worker"),
        ({"HOSTNAME": "llm-node-0-3", "JOB_COMPLETION_INDEX": "4"}, None),
        # With host networking the host is the node.
        ({"HOSTNAME": "k8s-worker-3", "TOCSIN_POD_NAME": "gpt-worker-0"}, "k8s-gpt"),
        # A notebook, a Deployment, a plain Job: nothing there names one job.
        ({"HOSTNAME": "jupyter-ana"}, None),
        ({"HOSTNAME": "train-x7k2p"}, None),
        ({"HOSTNAME": "train-3", "JOB_COMPLETION_INDEX": "4"}, None),
        ({}, None),
    ],
)
def test_kubernetes(environ: dict[str, str], job: str | None) -> None:
    assert scheduler_job({"KUBERNETES_SERVICE_HOST": "10.0.0.1", **environ}) == job
    assert scheduler_job(environ) is None


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"TRAINING_JOB_NAME": "Run-1", "TRAINING_JOB_ARN": "arn:…"}, "sagemaker-Run-1"),
        ({"AWS_BATCH_JOB_ID": "4c6b:17"}, "batch-4c6b:17"),
        # All nodes of a multi-node job are one run.
        ({"AWS_BATCH_JOB_ID": "4c6b#0"}, "batch-4c6b"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "a"}}'}, "ray-a"),
        # Each cluster counts its jobs from 1.
        ({"RAY_JOB_ID": "02000000"}, None),
        ({"AWS_BATCH_JOB_ID": "4c6b", "TORCHELASTIC_RUN_ID": "x"}, "torchelastic-x"),
    ],
)
def test_jobs_that_were_submitted(environ: dict[str, str], job: str | None) -> None:
    assert scheduler_job(environ) == job


def test_the_attempts_of_a_batch_job_are_lives_of_their_own() -> None:
    # Even if the job's definition sets the id by hand, for its nodes.
    by_hand = {JOB_ID: "of all attempts", "AWS_BATCH_JOB_ID": "4c6b"}
    lives = [
        of({**by_hand, "AWS_BATCH_JOB_ATTEMPT": attempt, "TORCHELASTIC_RESTART_COUNT": restarts})
        for attempt, restarts in (("1", "0"), ("1", "1"), ("2", "0"), ("2", "1"))
    ]
    assert len({one.incarnation for one in lives}) == 4
    assert [one.restart_count for one in lives] == [0, 1, 1000, 1001]


def test_start_twice_in_one_allocation_is_two_incarnations(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = {**SLURM, "XDG_RUNTIME_DIR": str(short_path)}
    loaded = load_config(None, base, folder=tmp_path)
    added = [in_process.environment(None, loaded, base) for _ in range(2)]
    assert len({of({**base, **each}).incarnation for each in added}) == 2


def test_trainings_are_counted_when_the_folder_of_the_count_has_gone(tmp_path: Path) -> None:
    found = []
    for _ in range(3):
        (tmp_path / "folder").mkdir()
        environ = {JOB_ID: "by hand", RUNTIME_DIR: str(tmp_path / "folder")}
        found.append(of(environ).training)
        for path in (tmp_path / "folder").iterdir():
            path.unlink()
        (tmp_path / "folder").rmdir()
    assert found == [0, 1, 2]


def test_ranks_that_srun_started_find_one_folder_on_their_node(
    tmp_path: Path, short_path: Path
) -> None:
    loaded = load_config(None, {}, folder=tmp_path)
    ranks = [
        {
            **SLURM, "SLURM_STEP_ID": step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
            "SLURM_NTASKS": "2", "XDG_RUNTIME_DIR": str(short_path),
        }
        for step in "01"
        for rank in "01"
    ]  # fmt: skip
    added = [in_process.environment(None, loaded, environ) for environ in ranks]
    folders = [each[RUNTIME_DIR] for each in added]
    assert folders[0] == folders[1]
    assert folders[2] == folders[3] != folders[0]
    jobs = [each[JOB_ID] for each in added]
    assert jobs[0] == jobs[1]
    assert jobs[2] == jobs[3] != jobs[0]


def test_ranks_take_the_identity_that_they_agreed_on() -> None:
    first = of({JOB_ID: "a"})
    other = of({JOB_ID: "b", "TORCHELASTIC_RESTART_COUNT": "2"}, rank=1)
    joined = other.joined(first.claim)
    assert (joined.rank, joined.job_id, joined.restart_count) == (1, "a", 0)
    assert Identity(run_id=joined.run_id, job_id="a", training=first.training).incarnation == (
        joined.incarnation
    )
    for claim in ("", "null", "[]", '["a", 1]', '["a", "b", 0]', '{"a": 1}'):
        with pytest.raises(ValueError, match=r"."):
            other.joined(claim)


@pytest.mark.parametrize(
    ("rank", "local", "world"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ],
)
def test_ranks_under_mpirun(rank: str, local: str, world: str) -> None:
    assert rank_of({rank: "5", local: "1", world: "8"}) == (5, 1, 8)
    assert rank_of({rank: "5", local: "1", world: "8", "RANK": "0", "WORLD_SIZE": "2"})[0] == 0
