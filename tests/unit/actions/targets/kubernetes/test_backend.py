"""Stops of jobs, against what a real API server answered (support/kubernetes/record.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.kubernetes.derived import derived
from support.kubernetes.exchanges import Exchange, Recording, played
from support.kubernetes.trainings import target_job
from support.servers.certificates import Authority, authority
from tocsin.actions.targets.kind import StopAsked, TargetJob
from tocsin.actions.targets.kubernetes.api import KubernetesApi
from tocsin.actions.targets.kubernetes.backend import TRIES, KubernetesBackend
from tocsin.actions.targets.kubernetes.config import KindName, KubernetesTarget, Operation
from tocsin.actions.targets.kubernetes.credentials import Cluster


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@dataclass
class Played:
    """A target of an API server that gives recorded answers, and the stop that was recorded."""

    backend: KubernetesBackend
    job: TargetJob


Play = Callable[..., AbstractAsyncContextManager[Played]]


@pytest.fixture
def play(made: Authority) -> Play:
    @asynccontextmanager
    async def opened(
        kind: KindName,
        op: Operation,
        change: Callable[[list[Exchange]], list[Exchange]] = list,
        namespaces: tuple[str, ...] = ("train",),
    ) -> AsyncIterator[Played]:
        recording = Recording.read(f"{op}-{kind}") if kind == "job" else derived(kind)
        async with played(made.context, *change(recording.exchanges)) as player:
            cluster = Cluster(server=player.url, authority=made.ca, token="abc")
            config = KubernetesTarget(type="kubernetes", kind=kind, op=op, namespaces=namespaces)
            backend = KubernetesBackend(config, KubernetesApi(cluster))
            yield Played(backend, target_job(recording.scheduler))
            await backend.close()

    return opened


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("job", "delete"),
        # Derived from what describes them; real ones are stopped in tests/peers.
        ("jobset", "suspend"),
        ("trainjob", "suspend"),
        ("pytorchjob", "suspend"),
    ],
)
async def test_a_job_is_ended_and_confirmed(play: Play, kind: KindName, op: Operation) -> None:
    async with play(kind, op) as it:
        assert (await it.backend.inspect(it.job)).state == "running"
        assert (await it.backend.stop(it.job)).result == "accepted"
        assert (await it.backend.inspect(it.job)).state == "running"
        ended = await it.backend.inspect(it.job)
        assert (ended.state, ended.reason.split()[-1]) == (
            "ended",
            "gone" if op == "delete" else "suspended",
        )
        assert (await it.backend.stop(it.job)).result == "accepted"


async def test_a_job_that_was_resumed_goes_on(play: Play) -> None:
    async with play("job", "suspend") as it:
        assert (await it.backend.inspect(it.job)).state == "running"
        assert (await it.backend.stop(it.job)).result == "accepted"
        assert (await it.backend.inspect(it.job)).state == "running"
        assert (await it.backend.inspect(it.job)).state == "ended"
        assert (await it.backend.stop(it.job)).result == "accepted"
        assert (await it.backend.inspect(it.job)).state == "replaced"
        assert (await it.backend.stop(it.job)).result == "refused"


def until_asked(exchanges: list[Exchange], status: int, reason: str) -> list[Exchange]:
    """The requests of the first look, and of a stop that is answered with this."""
    asked = next(n for n, one in enumerate(exchanges) if one.method in ("PATCH", "DELETE"))
    body = {"kind": "Status", "code": status, "reason": reason}
    return [*exchanges[:asked], replace(exchanges[asked], status=status, answer=body)]


@pytest.mark.parametrize(
    ("status", "reason", "result"),
    [
        (403, "Forbidden", "refused"),
        # The job of that name is another one.
        (422, "Invalid", "refused"),
        (401, "Unauthorized", "failed"),
        (429, "TooManyRequests", "failed"),
        (500, "InternalError", "failed"),
    ],
)
@pytest.mark.parametrize("op", ["suspend", "delete"])
async def test_a_request_that_is_refused(
    play: Play, op: Operation, status: int, reason: str, result: str
) -> None:
    async with play("job", op, lambda one: until_asked(one, status, reason)) as it:
        await it.backend.inspect(it.job)
        asked = await it.backend.stop(it.job)
        assert (asked.result, asked.reason) == (result, f"{status} {reason}")


@pytest.mark.parametrize("op", ["suspend", "delete"])
async def test_a_job_that_changes_each_time_is_asked_later(play: Play, op: Operation) -> None:
    def change(exchanges: list[Exchange]) -> list[Exchange]:
        conflict = until_asked(exchanges, 409, "Conflict")
        # The last three requests of a stop: the job, its pods, the change.
        return [*conflict, *conflict[-3:] * (TRIES - 1)]

    async with play("job", op, change) as it:
        await it.backend.inspect(it.job)
        asked = await it.backend.stop(it.job)
        assert asked == StopAsked("failed", "the Job changed 3 times while it was asked")


async def test_a_job_that_is_gone_when_it_is_asked(play: Play) -> None:
    def change(exchanges: list[Exchange]) -> list[Exchange]:
        *before, last = until_asked(exchanges, 404, "NotFound")
        return [*before, replace(last, answer=last.answer | {"details": {"name": "gpt"}})]

    async with play("job", "suspend", change) as it:
        await it.backend.inspect(it.job)
        assert (await it.backend.stop(it.job)).result == "accepted"


async def test_an_answer_without_the_suspension_is_no_suspension(play: Play) -> None:
    """Something between us and the job takes it out again."""

    def change(exchanges: list[Exchange]) -> list[Exchange]:
        *before, last = until_asked(exchanges, 200, "")
        job = next(one.answer for one in before if one.answer.get("kind") == "Job")
        return [*before, replace(last, answer=job)]

    async with play("job", "suspend", change) as it:
        await it.backend.inspect(it.job)
        asked = await it.backend.stop(it.job)
        assert asked.result == "refused"
        assert "still not suspended" in asked.reason


async def test_another_namespace_is_refused_without_a_request(play: Play) -> None:
    async with play("job", "suspend", lambda _: [], ("other",)) as it:
        seen = await it.backend.inspect(it.job)
        asked = await it.backend.stop(it.job)
        assert seen.state == "unknown"
        assert asked == StopAsked("refused", "namespace train is not one of this target's")


async def test_a_run_without_a_namespace_is_refused_without_a_request(play: Play) -> None:
    async with play("job", "suspend", lambda _: []) as it:
        names = {k: v for k, v in it.job.scheduler.names.items() if k != "namespace"}
        job = replace(it.job, scheduler=it.job.scheduler.model_copy(update={"names": names}))
        asked = await it.backend.stop(job)
        assert asked.result == "refused"
        assert "TOCSIN_POD_NAMESPACE" in asked.reason


async def test_a_pod_of_no_job_is_not_ended(play: Play) -> None:
    """A pod that somebody made by hand, or that a Deployment made."""

    def change(exchanges: list[Exchange]) -> list[Exchange]:
        pods = exchanges[0]
        listed: dict[str, Any] = pods.answer
        [pod] = listed["items"]
        meta = {k: v for k, v in pod["metadata"].items() if k != "ownerReferences"}
        alone = replace(pods, answer=listed | {"items": [pod | {"metadata": meta}]})
        return [alone, alone]

    async with play("job", "suspend", change) as it:
        assert (await it.backend.inspect(it.job)).state == "running"
        asked = await it.backend.stop(it.job)
        assert asked == StopAsked("refused", "the run's pod belongs to no Job that is there")


async def test_nothing_listens(tmp_path: Path) -> None:
    api = KubernetesApi(Cluster(server="https://127.0.0.1:1", token="abc"))
    backend = KubernetesBackend(
        KubernetesTarget(type="kubernetes", kind="job", namespaces=("train",)), api
    )
    job = target_job(Recording.read("suspend-job").scheduler)
    assert (await backend.inspect(job)).reason == "connection refused"
    assert await backend.stop(job) == StopAsked("failed", "connection refused")
    await backend.close()
