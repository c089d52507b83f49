"""Jobs of a real Slurm that are ended as a stop target: the right one, and for good."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from support.actions.target_jobs import target_job
from support.servers.slurm import (
    API,
    Slurm,
    processes_of,
    slurm_cluster,
    slurm_rest,
    unavailable,
)
from support.waiting import wait_until
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import Target, TargetContext, TargetJob
from tocsin.actions.targets.slurm.config import SlurmTarget
from tocsin.actions.targets.slurm.kind import Slurm as SlurmKind
from tocsin.emitter.process.scheduler import scheduler_of
from tocsin.schemas.monotonic_clock import unix_ms

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

# A job says what it sees before it works; `env` is what a launcher in it would record.
NOTE = 'env > "env-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"; echo started'
WAIT = "sleep 1000 & wait"
# It lives on after a plain scancel: the job is pending again before it has ended.
REQUEUES_ITSELF = f"trap 'scontrol requeue $SLURM_JOB_ID; exit 0' TERM\n{NOTE}\n{WAIT}"
PLAIN = f"{NOTE}\nexec sleep 1000"
STUBBORN = f"trap '' TERM\n{PLAIN}"
SAVES_IN_A_STEP = f"srun bash -c 'trap \"touch saved; exit 0\" TERM; {NOTE}; {WAIT}'"


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """One node. The folder's path is short: it holds a Unix socket."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="tocsin-s") as folder,
        slurm_cluster(Path(folder), {}) as cluster,
    ):
        yield cluster


@asynccontextmanager
async def target(slurm: Slurm, **rest: str) -> AsyncIterator[Target]:
    """The cluster as a target; with a URL and a user, by its REST API."""
    token = ""
    config: dict[str, object] = {"type": "slurm"}
    if rest:
        token = slurm.call("scontrol", "token", f"username={rest['user']}").partition("=")[2]
        config["rest"] = {**rest, "api": API, "token": {"secret": "slurm"}}
    context = TargetContext(
        secrets={"slurm": SecretStr(token)},
        guard=AddressGuard(private=True),
        folder=slurm.folder,
        environ=slurm.environ,
    )
    made = SlurmKind().target("hpc", SlurmTarget.model_validate(config), context)
    try:
        yield made
    finally:
        await made.close()


def started(slurm: Slurm, job_id: str, restarts: int = 0) -> TargetJob:
    """The job of that id once it works, as a run in it has recorded it."""
    noted = slurm.folder / f"env-{job_id}-{restarts}"
    wait_until(lambda: noted.exists() and "SLURM_JOB_ID=" in noted.read_text(), 60, "it works")
    environ = dict(re.findall(r"^(\w+)=(.*)$", noted.read_text(), re.MULTILINE))
    scheduler = scheduler_of(environ)
    assert scheduler is not None
    return target_job("slurm", dict(scheduler.names), started_ms=unix_ms())


async def ended(made: Target, job: TargetJob) -> str:
    """Look until the job does not run any more: the last reason."""
    found = await made.inspect(job)
    async with asyncio.timeout(120):
        while found.state == "running":
            await asyncio.sleep(0.2)
            found = await made.inspect(job)
    assert found.state == "ended", found
    return found.reason


async def state(made: Target, job: TargetJob) -> str:
    return (await made.inspect(job)).state


async def test_a_stopped_job_does_not_come_back_and_its_neighbours_go_on(slurm: Slurm) -> None:
    async with target(slurm) as made:
        job_id = slurm.submit(REQUEUES_ITSELF, "--requeue")
        job = started(slurm, job_id)
        assert (await made.stop(job)).result == "accepted"
        assert await ended(made, job) == "CANCELLED"
        # Neither its own trap nor anybody later has brought it back.
        assert "presently disabled" in slurm.said(job_id)
        assert slurm.fails("scontrol", "requeue", job_id)
        assert slurm.job(job_id)["Restarts"] == "0"
        again = await made.stop(job)
        assert (again.result, again.reason) == (
            "accepted",
            "there was nothing left to end: CANCELLED",
        )

        array = slurm.submit(PLAIN, "--array=0-1")
        # The last task has the id of the whole array.
        last = started(slurm, array)
        first = started(slurm, str(int(array) + 1))
        assert last.scheduler.names["array_task"] == "1"
        assert (await made.stop(last)).result == "accepted"
        assert await ended(made, last) == "CANCELLED"
        assert await state(made, first) == "running"

        later = target_job("slurm", {**first.scheduler.names, "restarts": "1"})
        assert await state(made, later) == "replaced"
        assert (await made.stop(later)).result == "refused"
        unknown = target_job("slurm", {"job": "4711", "cluster": "tests"})
        assert (await made.stop(unknown)).reason.endswith("the controller lists it no more")
        assert await state(made, first) == "running"


@pytest.mark.peers
async def test_a_late_stop_does_not_touch_the_second_life(slurm: Slurm) -> None:
    async with target(slurm) as made:
        job_id = slurm.submit(PLAIN, "--requeue")
        first = started(slurm, job_id)
        slurm.call("scontrol", "requeue", job_id)
        assert await state(made, first) == "replaced"
        assert (await made.stop(first)).result == "refused"
        second = started(slurm, job_id, restarts=1)
        assert (await made.stop(first)).result == "refused"
        assert await state(made, second) == "running"
        assert slurm.job(job_id)["Requeue"] == "1"
        assert (await made.stop(second)).result == "accepted"
        assert await ended(made, second) == "CANCELLED"


@pytest.mark.peers
async def test_a_step_may_save_and_one_that_ignores_sigterm_is_killed(slurm: Slurm) -> None:
    async with target(slurm) as made:
        saves, stubborn = slurm.submit(SAVES_IN_A_STEP), slurm.submit(STUBBORN)
        for job_id in (saves, stubborn):
            assert (await made.stop(started(slurm, job_id))).result == "accepted"
        assert await state(made, started(slurm, stubborn)) == "running"
        assert await ended(made, started(slurm, stubborn)) == "CANCELLED"
        assert slurm.job(stubborn)["ExitCode"] == "0:9"
        assert await ended(made, started(slurm, saves)) == "CANCELLED"
        # What it writes to srun is lost once srun is gone.
        assert (slurm.folder / "saved").exists()


@pytest.mark.peers
async def test_a_controller_that_is_away_for_a_while_delays_the_stop(slurm: Slurm) -> None:
    async with target(slurm) as made:
        job = started(slurm, slurm.submit(PLAIN))
        slurm.stop_controller()
        asked = await made.stop(job)
        assert (asked.result, "cannot be reached" in asked.reason) == ("failed", True)
        assert await state(made, job) == "unknown"
        slurm.start_controller()
        assert await state(made, job) == "running"
        assert (await made.stop(job)).result == "accepted"
        assert await ended(made, job) == "CANCELLED"


@pytest.mark.peers
@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
async def test_a_user_s_job_is_ended_by_its_owner_or_an_operator(slurm: Slurm) -> None:
    as_nobody = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    job = started(slurm, slurm.submit(PLAIN))
    programs = slurm.folder / "programs"
    programs.mkdir()
    for name in ("squeue", "scontrol", "scancel"):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {" ".join(as_nobody)} /usr/bin/{name} "$@"\n')
        path.chmod(0o755)
    environ = {**slurm.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    async with target(Slurm(environ, slurm.folder)) as theirs, target(slurm) as made:
        assert await state(theirs, job) == "running"
        asked = await theirs.stop(job)
        assert asked.result == "refused"
        assert "not permitted" in asked.reason
        assert await state(made, job) == "running"


@pytest.mark.peers
async def test_all_parts_of_a_heterogeneous_job_end_together() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="tocsin-s") as folder,
        slurm_cluster(Path(folder), {}, two_nodes=True) as slurm,
    ):
        async with target(slurm) as made:
            job_id = slurm.submit(f"{NOTE}\nsrun --het-group=0,1 sleep 1000", "-n1", ":", "-n1")
            job = started(slurm, job_id)
            assert job.scheduler.names["het_job"] == job_id
            assert (await made.stop(job)).result == "accepted"
            assert await ended(made, job) == "CANCELLED"
            states = slurm.call("squeue", "-h", "-t", "all", "-o", "%T").split()
            assert states == ["CANCELLED", "CANCELLED"]


@pytest.mark.peers
@pytest.mark.skipif(unavailable("slurmrestd") is not None, reason=unavailable("slurmrestd") or "")
async def test_a_real_slurmrestd_ends_a_job_for_good() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="tocsin-s") as folder,
        slurm_cluster(Path(folder), {}, tokens=True) as slurm,
        slurm_rest(slurm) as url,
    ):
        owner = slurm.call("id", "-un")
        async with target(slurm, url=url, user=owner) as made:
            job_id = slurm.submit(REQUEUES_ITSELF, "--requeue")
            job = started(slurm, job_id)
            assert (await made.stop(job)).result == "accepted"
            assert await ended(made, job) == "CANCELLED"
            assert "presently disabled" in slurm.said(job_id)
            array = slurm.submit(PLAIN, "--array=0-1")
            last, first = started(slurm, array), started(slurm, str(int(array) + 1))
            assert (await made.stop(last)).result == "accepted"
            assert await ended(made, last) == "CANCELLED"
            assert await state(made, first) == "running"
        if owner == "root":
            async with target(slurm, url=url, user="nobody") as theirs:
                assert "not permitted" in (await theirs.stop(first)).reason


@pytest.mark.peers
def test_the_end_of_the_tests_cluster_leaves_no_process() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tocsin-s") as name:
        folder = Path(name)
        with slurm_cluster(folder, {}) as slurm:
            # Slurm finds by process group, so it does not end what has left the job's.
            let_go = (
                "setsid bash -c 'trap \"\" TERM; echo $$ > let-go; while :; do sleep 1; done' &"
            )
            slurm.submit(f"{let_go}\nexec sleep 1000")
            noted = folder / "let-go"
            wait_until(lambda: noted.exists() and noted.read_text().strip(), 60, "it works")
            pid = int(noted.read_text())
            assert pid in {process.pid for process in processes_of(folder)}
        assert not psutil.pid_exists(pid)
        assert processes_of(folder) == []
