"""Stops of jobs in a real Ray cluster: the right one ends, and is seen to be gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from support.actions.target_jobs import target_job
from support.servers.real_ray import TOKEN, RealRay, real_ray
from support.waiting import wait_until
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext, TargetJob
from tocsin.actions.targets.ray_job.config import RayTarget
from tocsin.actions.targets.ray_job.kind import Ray, RayJobs
from tocsin.emitter.process.scheduler import scheduler_of

pytestmark = pytest.mark.peers

_TRAINING = """
import json, os, pathlib, signal, sys, time

folder = pathlib.Path(sys.argv[1])

def save(*_):
    (folder / "asked").touch()
    time.sleep(5)
    (folder / "saved").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
told = {**os.environ, "PID": str(os.getpid())}
(folder / "part").write_text(json.dumps(told))
(folder / "part").rename(folder / "ready")
while True:
    time.sleep(60)
"""
"""A job that takes 5 s to save its checkpoint."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRay]:
    with real_ray(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "training.py"
    path.write_text(_TRAINING)
    return path


@asynccontextmanager
async def target_of(cluster: RealRay) -> AsyncIterator[RayJobs]:
    config = RayTarget.model_validate(
        {"type": "ray", "address": cluster.address, "token": {"secret": "ray"}}
    )
    context = TargetContext(
        secrets={"ray": SecretStr(TOKEN)},
        guard=AddressGuard(private=True),
        folder=Path(),
        environ={},
    )
    jobs = Ray().target("ray-a", config, context)
    try:
        yield jobs
    finally:
        await jobs.close()


def job_of(cluster: RealRay, environ: dict[str, str]) -> TargetJob:
    """The job as a training in it would record it, which started a moment after it."""
    scheduler = scheduler_of(environ)
    assert scheduler is not None
    started_ms = cluster.ask("GET", f"jobs/{scheduler.names['submission']}")["start_time"] + 500
    return target_job(scheduler.kind, dict(scheduler.names), started_ms=started_ms)


async def ended(cluster: RealRay, jobs: RayJobs, job: TargetJob) -> JobSeen:
    submission = job.scheduler.names["submission"]
    await asyncio.to_thread(wait_until, lambda: cluster.status(submission) != "RUNNING")
    return await jobs.inspect(job)


async def test_the_job_that_was_meant_is_killed_after_3_s(
    cluster: RealRay, script: Path, tmp_path: Path
) -> None:
    environ = cluster.submit(script, tmp_path / "a", "run-1")
    other = cluster.submit(script, tmp_path / "b", "run-1-retry")
    job = job_of(cluster, environ)
    assert job.scheduler.names["submission"] == "run-1"
    async with target_of(cluster) as jobs:
        assert await jobs.inspect(job) == JobSeen("running", "RUNNING")
        assert await jobs.stop(job) == StopAsked("accepted", "asked to end it")
        assert await ended(cluster, jobs, job) == JobSeen("ended", "STOPPED")
        assert await jobs.stop(job) == StopAsked(
            "accepted", "there was nothing left to end: STOPPED"
        )

        # Ray answers `STOPPED` as it sends SIGKILL.
        wait_until(lambda: not psutil.pid_exists(int(environ["PID"])))
        assert (tmp_path / "a/asked").exists()
        assert not (tmp_path / "a/saved").exists()
        retry = job_of(cluster, other)
        assert await jobs.inspect(retry) == JobSeen("running", "RUNNING")
        assert psutil.pid_exists(int(other["PID"]))
        assert (await jobs.stop(retry)).result == "accepted"
        await ended(cluster, jobs, retry)


async def test_a_job_has_the_time_that_it_was_submitted_with(
    cluster: RealRay, script: Path, tmp_path: Path
) -> None:
    longer = {"RAY_JOB_STOP_WAIT_TIME_S": "30"}
    job = job_of(cluster, cluster.submit(script, tmp_path / "c", "patient", longer))
    async with target_of(cluster) as jobs:
        assert (await jobs.stop(job)).result == "accepted"
        assert await ended(cluster, jobs, job) == JobSeen("ended", "STOPPED")
    assert (tmp_path / "c/saved").exists()


async def test_a_later_job_of_the_same_id_goes_on(
    cluster: RealRay, script: Path, tmp_path: Path
) -> None:
    job = job_of(cluster, cluster.submit(script, tmp_path / "d", "again"))
    earlier = target_job("ray", dict(job.scheduler.names), started_ms=job.started_ms - 120_000)
    async with target_of(cluster) as jobs:
        assert (await jobs.inspect(earlier)).state == "replaced"
        assert (await jobs.stop(earlier)).result == "refused"
        assert await jobs.inspect(job) == JobSeen("running", "RUNNING")
        await jobs.stop(job)
        await ended(cluster, jobs, job)


async def test_a_driver_that_was_not_submitted_and_a_job_that_is_gone_are_unknown(
    cluster: RealRay, script: Path, tmp_path: Path
) -> None:
    job = job_of(cluster, cluster.submit(script, tmp_path / "e", "deleted"))
    async with target_of(cluster) as jobs:
        # The cluster's own process is a driver of it.
        driver = target_job("ray", {"job": "01000000"})
        assert (await jobs.inspect(driver)).state == "unknown"
        assert (await jobs.stop(driver)).result == "failed"
        await jobs.stop(job)
        await ended(cluster, jobs, job)
        cluster.ask("DELETE", "jobs/deleted")
        assert await jobs.inspect(job) == JobSeen("unknown", "404 Not Found")
