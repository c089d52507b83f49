"""Ray jobs, against a server that answers as Ray documents it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from support.actions.target_jobs import STARTED_MS, target_job
from support.servers.fault_server import fault_server
from support.servers.ray_cluster import TOKEN, RayCluster, job_details, ray_cluster
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext, TargetJob
from tocsin.actions.targets.ray_job.config import RayTarget
from tocsin.actions.targets.ray_job.kind import Ray, RayJobs
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.runs import SchedulerJob

ID = "raysubmit_Ab12"
JOB = target_job("ray", {"submission": ID})


def context(*, private: bool = True) -> TargetContext:
    return TargetContext(
        secrets={"token": SecretStr(TOKEN)},
        guard=AddressGuard(private=private),
        folder=Path(),
        environ={},
    )


@asynccontextmanager
async def jobs_at(address: str, *, private: bool = True, **more: Any) -> AsyncIterator[RayJobs]:
    """The target of a cluster, as it is configured."""
    config = RayTarget.model_validate({"type": "ray", "address": address, **more})
    found = Ray().target("ray-a", config, context(private=private))
    try:
        yield found
    finally:
        await found.close()


@asynccontextmanager
async def cluster_of(*jobs: dict[str, Any]) -> AsyncIterator[tuple[RayCluster, RayJobs]]:
    async with ray_cluster(*jobs) as cluster, jobs_at(cluster.address + "/") as found:
        yield cluster, found


async def test_a_job_is_stopped_by_its_submission_id_and_seen_to_be_gone() -> None:
    retried = job_details(f"{ID}-retry", job_id="03000000")
    async with cluster_of(job_details(ID), retried) as (cluster, jobs):
        assert await jobs.inspect(JOB) == JobSeen("running", "RUNNING")
        assert await jobs.stop(JOB) == StopAsked("accepted", "asked to end it")
        assert await jobs.inspect(JOB) == JobSeen("ended", "STOPPED")
        # An attempt after one whose answer was lost asks for nothing a second time.
        assert await jobs.stop(JOB) == StopAsked(
            "accepted", "there was nothing left to end: STOPPED"
        )
        assert retried["status"] == "RUNNING"
        assert cluster.seen.count(f"POST /api/jobs/{ID}/stop") == 1


async def test_a_job_of_which_only_ray_s_own_id_is_known() -> None:
    async with cluster_of(job_details(ID)) as (cluster, jobs):
        by_id = target_job("ray", {"job": "02000000"})
        assert (await jobs.stop(by_id)).result == "accepted"
        assert cluster.seen == ["GET /api/jobs/02000000", f"POST /api/jobs/{ID}/stop"]


@pytest.mark.parametrize(
    ("details", "state"),
    [
        (job_details(ID, start_time=STARTED_MS + 90_000), "replaced"),
        (job_details(ID, "STOPPED", start_time=STARTED_MS + 90_000), "replaced"),
        (job_details(ID, start_time=None), "unknown"),
        (job_details(ID, type="DRIVER"), "unknown"),
        (job_details(ID, attempt_number=1), "unknown"),
        (job_details(ID, "SECRET"), "unknown"),
        # Its own id is that which somebody gave to another job.
        (job_details("other", job_id=ID), "unknown"),
        (job_details("other"), "unknown"),
    ],
)
async def test_another_job_goes_on(details: dict[str, Any], state: str) -> None:
    async with cluster_of(details) as (cluster, jobs):
        seen = await jobs.inspect(JOB)
        asked = await jobs.stop(JOB)
        assert seen.state == state
        assert asked.result == ("refused" if state == "replaced" else "failed")
        assert not any(request.startswith("POST") for request in cluster.seen)
        assert "SECRET" not in seen.reason + asked.reason


async def test_a_job_that_ends_between_look_and_stop_has_ended() -> None:
    async with cluster_of(job_details(ID)) as (cluster, jobs):
        cluster.ends_before_stop = True
        assert await jobs.stop(JOB) == StopAsked(
            "accepted", "there was nothing left to end: SUCCEEDED"
        )


async def test_the_token_is_shown_and_without_it_nothing_is_known() -> None:
    async with ray_cluster(job_details(ID)) as cluster:
        cluster.token = TOKEN
        async with jobs_at(cluster.address) as jobs:
            assert await jobs.inspect(JOB) == JobSeen("unknown", "401 Unauthorized")
        async with jobs_at(cluster.address, token={"secret": "token"}) as jobs:
            assert (await jobs.stop(JOB)).result == "accepted"


@pytest.mark.parametrize("fault", ["status/503", "status/200", "status/302", "reset", "half"])
async def test_an_answer_that_is_none_is_unknown_and_never_an_end(fault: str) -> None:
    async with fault_server() as server, jobs_at(server.url(f"/{fault}?")) as jobs:
        seen, asked = await jobs.inspect(JOB), await jobs.stop(JOB)
    assert (seen.state, asked.result) == ("unknown", "failed")
    assert "SECRET" not in seen.reason + asked.reason


async def test_a_guarded_address_is_not_connected_to() -> None:
    async with (
        ray_cluster(job_details(ID)) as cluster,
        jobs_at(cluster.address, private=False) as jobs,
    ):
        seen = await jobs.inspect(JOB)
        assert "--allow-cidr 127.0.0.1" in seen.reason
        assert cluster.seen == []


@pytest.mark.parametrize(
    "job",
    [
        target_job("ray", {"submission": "../version"}),
        target_job("ray", {"submission": "a/b"}),
        target_job("ray", {"job": "gpt"}),
        target_job("ray", {"address": "10.0.0.1:6379"}),
        target_job("ray", {"submission": ID}, started_ms=0),
    ],
)
async def test_names_that_identify_no_job_are_asked_of_nobody(job: TargetJob) -> None:
    async with cluster_of(job_details(ID)) as (cluster, jobs):
        assert (await jobs.inspect(job)).state == "unknown"
        assert (await jobs.stop(job)).result == "refused"
        assert cluster.seen == []


def test_a_grace_beyond_ray_s_own_is_a_warning_that_says_what_to_set() -> None:
    def warnings(grace: str) -> list[Any]:
        given = {"type": "ray", "address": "http://ray:8265", "grace": grace}
        return list(Ray().warnings(RayTarget.model_validate(given), ("targets", "a")))

    assert RayTarget(type="ray", address="http://ray:8265").grace.total_seconds() == 3
    assert warnings("3s") == []
    [longer] = warnings("29500ms")
    assert longer.loc == ("targets", "a", "grace")
    assert "RAY_JOB_STOP_WAIT_TIME_S=30" in longer.message
    assert longer.code == "grace_of_backend"


def test_what_can_be_configured() -> None:
    kind = Ray()
    tls = RayTarget.model_validate({"type": "ray", "address": "http://ray:8265", "tls": {}})
    assert [one.loc for one in kind.check(tls, ())] == [("tls",)]
    assert kind.can_end(tls, JOB.scheduler)
    assert not kind.can_end(tls, SchedulerJob(kind="kubernetes"))
    missing = RayTarget.model_validate({"type": "ray", "address": {"secret": "none"}})
    with pytest.raises(ConfigurationError, match="target 'a': there is no address"):
        kind.target("a", missing, context())
