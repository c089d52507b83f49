"""Slurm by its REST API: a server on loopback that answers as slurmrestd 22.05 did, and as the
newer versions are documented to do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from support.actions.target_jobs import target_job
from support.servers.fault_server import fault_server
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, StopAsked, Target, TargetContext
from tocsin.actions.targets.slurm.config import SlurmTarget
from tocsin.actions.targets.slurm.kind import Slurm
from tocsin.schemas.errors import ConfigurationError

ANSWERS = Path(__file__).parent / "answers"
NAMES = {"job": "3", "restarts": "0", "cluster": "tests"}
JOB = target_job("slurm", NAMES, started_ms=0)
OLD, NEW = "v0.0.38", "v0.0.41"


def answer(name: str) -> Any:
    return json.loads((ANSWERS / f"rest-{name}.json").read_text())


def newer(old: Any) -> Any:
    """The same answer in the forms of v0.0.40 and after."""
    numbers = ("array_job_id", "array_task_id", "het_job_id", "start_time")
    for job in old.get("jobs", ()):
        job["job_state"] = [job["job_state"]]
        in_array = bool(job["array_job_id"])
        for name in numbers:
            job[name] = {"set": True, "infinite": False, "number": job[name] or 0}
        job["array_task_id"]["set"] = in_array
    return old


@dataclass
class Rest:
    """A slurmrestd with one list of jobs."""

    api: str
    port: int = 0
    listed: Any = None
    status: int = 200
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[tuple[str | None, str | None]] = field(default_factory=list)
    keeps: bool = True
    changed: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """What is answered to a change, by its method."""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, body))
        users = (
            request.headers.get("X-SLURM-USER-NAME"),
            request.headers.get("X-SLURM-USER-TOKEN"),
        )
        self.headers.append(users)
        if request.method == "GET":
            return web.json_response(self.listed, status=self.status)
        if request.method == "POST" and self.keeps:
            # v0.0.38 takes the options of sbatch, of which --requeue has no value.
            forbids = body == ({"no_requeue": True} if self.api == OLD else {"requeue": False})
            for job in self.listed["jobs"]:
                job["requeue"] = not forbids
        status, answered = self.changed.get(request.method, (200, {"errors": []}))
        return web.json_response(answered, status=status)

    def changes(self) -> list[tuple[str, str, Any]]:
        return [one for one in self.asked if one[0] != "GET"]


@pytest.fixture(params=[OLD, NEW])
async def rest(request: pytest.FixtureRequest) -> AsyncIterator[Rest]:
    made = Rest(request.param, listed=answer("running"))
    if made.api == NEW:
        newer(made.listed)
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", made.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


def target(url: str, api: str = OLD, *, private: bool = True, **secrets: str) -> Target:
    config = SlurmTarget.model_validate(
        {
            "type": "slurm",
            "rest": {"url": url, "api": api, "user": "tocsin", "token": {"secret": "slurm"}},
        }
    )
    context = TargetContext(
        secrets={name: SecretStr(value) for name, value in secrets.items()},
        guard=AddressGuard(private=private),
        folder=Path(),
        environ={},
    )
    return Slurm().target("hpc", config, context)


def cluster(rest: Rest) -> Target:
    return target(f"http://127.0.0.1:{rest.port}/", rest.api, slurm="the-token")


async def test_a_job_may_not_be_queued_again_before_it_is_cancelled(rest: Rest) -> None:
    slurm = cluster(rest)
    assert await slurm.inspect(JOB) == JobSeen("running", "RUNNING")
    assert await slurm.stop(JOB) == StopAsked("accepted", "slurmrestd answered 200 OK")
    path = f"/slurm/{rest.api}/job/3"
    body = {"no_requeue": True} if rest.api == OLD else {"requeue": False}
    assert rest.changes() == [("POST", path, body), ("DELETE", path, None)]
    assert set(rest.headers) == {("tocsin", "the-token")}
    await slurm.close()


async def test_one_that_stays_requeueable_is_not_cancelled(rest: Rest) -> None:
    rest.keeps = False
    slurm = cluster(rest)
    assert await slurm.stop(JOB) == StopAsked("refused", "Slurm still allows a requeue of the job")
    assert [method for method, _, _ in rest.changes()] == ["POST"]
    await slurm.close()


async def test_another_incarnation_or_cluster_is_not_touched(rest: Rest) -> None:
    slurm = cluster(rest)
    for changed, state in (({"restarts": "1"}, "replaced"), ({"cluster": "other"}, "unknown")):
        other = target_job("slurm", NAMES | changed, started_ms=0)
        assert (await slurm.inspect(other)).state == state
        assert (await slurm.stop(other)).result != "accepted"
    assert rest.changes() == []
    await slurm.close()


async def test_tasks_of_arrays_and_parts_of_jobs_are_read(rest: Rest) -> None:
    slurm = cluster(rest)
    rest.listed = answer("array") if rest.api == OLD else newer(answer("array"))
    task = {"job": "5", "cluster": "tests", "array_job": "4", "array_task": "0"}
    assert (await slurm.inspect(target_job("slurm", task, started_ms=0))).state == "running"
    assert rest.asked[-1][1] == f"/slurm/{rest.api}/job/4_0"
    sibling = task | {"array_task": "1"}
    assert (await slurm.inspect(target_job("slurm", sibling, started_ms=0))).state == "replaced"
    rest.listed = answer("het") if rest.api == OLD else newer(answer("het"))
    rest.listed["jobs"][0]["job_state"] = "CANCELLED" if rest.api == OLD else ["CANCELLED"]
    parts = target_job("slurm", {"job": "7", "cluster": "tests"}, started_ms=0)
    assert await slurm.inspect(parts) == JobSeen("running", "RUNNING")
    await slurm.close()


@pytest.mark.parametrize("status", [404, 500])
async def test_a_job_that_is_not_listed_may_be_hidden(rest: Rest, status: int) -> None:
    rest.listed, rest.status = answer("unknown"), status
    slurm = cluster(rest)
    assert await slurm.inspect(JOB) == JobSeen(
        "unknown", "not listed: it ended long ago, or is hidden from us"
    )
    await slurm.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2002, ("refused", "not permitted; the job's owner or an operator of Slurm may do it")),
        (2010, ("refused", "not permitted; the job's owner or an operator of Slurm may do it")),
        (2021, ("accepted", "answered 500 Internal Server Error")),
        (1800, ("failed", "Slurm's error 1800")),
        (-1, ("failed", "Slurm's error -1")),
    ],
)
async def test_errors_are_told_apart_by_their_numbers(
    rest: Rest, number: int, expected: tuple[str, str]
) -> None:
    planted = [{"error_number": number, "error": "SECRET", "description": "SECRET"}]
    rest.changed["DELETE"] = (500, {"errors": planted})
    slurm = cluster(rest)
    asked = await slurm.stop(JOB)
    assert asked.result == expected[0]
    assert asked.reason.removeprefix("slurmrestd").removeprefix(":").strip() == expected[1]
    await slurm.close()


@pytest.mark.parametrize(
    "listed",
    [
        None,
        [],
        {"jobs": 5},
        {"jobs": [{"job_id": 3}]},
        {"jobs": [{"job_id": "3", "cluster": "tests"}]},
        {"jobs": [], "errors": "SECRET"},
    ],
)
async def test_what_is_no_list_of_jobs_is_no_end(rest: Rest, listed: Any) -> None:
    rest.listed = listed
    slurm = cluster(rest)
    found = await slurm.inspect(JOB)
    assert found.state == "unknown"
    assert "SECRET" not in found.reason
    await slurm.close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/status/503?after=7", "slurmrestd answered 503 Service Unavailable"),
        ("/status/401", "slurmrestd does not accept the token"),
        ("/status/301", "slurmrestd answered 301 Moved Permanently"),
        ("/reset", "slurmrestd: connection reset"),
        ("/half", "slurmrestd: connection reset"),
    ],
)
async def test_a_server_with_faults_is_no_end(path: str, reason: str) -> None:
    async with fault_server() as server:
        # What follows the address of a slurmrestd is behind its "?" here.
        slurm = target(server.url(path + ("&" if "?" in path else "?") + "x="), slurm="t")
        assert await slurm.inspect(JOB) == JobSeen("unknown", reason)
        assert (await slurm.stop(JOB)).result == "failed"
        await slurm.close()


async def test_only_allowed_addresses_get_the_token() -> None:
    async with fault_server() as server:
        slurm = target(server.url("/status/200"), private=False, slurm="t")
        found = await slurm.inspect(JOB)
        assert found.state == "unknown"
        assert "--allow-cidr 127.0.0.1" in found.reason
        assert server.seen == []
        await slurm.close()


def test_a_target_without_its_token_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="target 'hpc': expected values of the secrets"):
        target("https://slurm.example.com")
    with pytest.raises(ConfigurationError, match="target 'hpc': expected a token without line"):
        target("https://slurm.example.com", slurm="a\nb")
