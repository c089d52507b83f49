"""Requests to an API server: what is sent, and that all that goes wrong is a value."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from pydantic import JsonValue

from support.kubernetes.exchanges import Exchange, played
from support.servers.certificates import Authority, authority
from support.servers.fault_server import fault_server
from tocsin.actions.targets.kubernetes.api import Answer, KubernetesApi
from tocsin.actions.targets.kubernetes.credentials import Cluster
from tocsin.actions.targets.kubernetes.objects import Pod
from tocsin.actions.targets.kubernetes.workloads import JOB, TRAIN_JOB

JOBS = "/apis/batch/v1/namespaces/train/jobs"
PODS = "/api/v1/namespaces/train/pods"
ALIVE = "status.phase!=Succeeded,status.phase!=Failed"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"), "127.0.0.1")


def pod(name: str, phase: str = "Running") -> dict[str, object]:
    return {
        "metadata": {"name": name, "uid": "1", "creationTimestamp": "2026-11-23T10:00:00Z"},
        "status": {"phase": phase},
    }


def refusal(status: int, reason: str, **details: str) -> Exchange:
    body = {"kind": "Status", "code": status, "reason": reason, "message": "what it was sent"}
    return Exchange("GET", f"{JOBS}/gpt", {}, None, status, body | {"details": details})


async def test_a_request_logs_in_and_trusts_only_its_authority(made: Authority) -> None:
    found: dict[str, JsonValue] = {"metadata": {"name": "gpt"}}
    async with played(made.context, Exchange("GET", f"{JOBS}/gpt", {}, None, 200, found)) as player:
        api = KubernetesApi(Cluster(server=player.url, authority=made.ca, token="abc"))
        assert await api.get(JOB, "train", "gpt") == Answer(200, found)
        assert player.headers[0]["Authorization"] == "Bearer abc"
        other = KubernetesApi(Cluster(server=player.url, token="abc"))
        assert (await other.get(JOB, "train", "gpt")).why == "TLS certificate not accepted"
        assert len(player.headers) == 1
        await api.close()
        await other.close()


async def test_an_authority_that_was_replaced_is_read_again(
    made: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "ca.crt"
    path.write_bytes(authority(tmp_path / "old", "127.0.0.1").ca.read_bytes())
    exchange = Exchange("GET", f"{JOBS}/gpt", {}, None, 200, {"metadata": {}})
    async with played(made.context, exchange) as player:
        api = KubernetesApi(Cluster(server=player.url, authority=path, token="abc"))
        assert (await api.get(JOB, "train", "gpt")).status == 0
        path.write_bytes(made.ca.read_bytes())
        assert (await api.get(JOB, "train", "gpt")).status == 200
        await api.close()


@pytest.mark.parametrize(
    ("exchange", "why", "missing"),
    [
        (refusal(403, "Forbidden"), "403 Forbidden", False),
        (refusal(401, "Unauthorized"), "401 Unauthorized", False),
        (refusal(404, "NotFound", name="gpt", kind="jobs"), "404 NotFound", True),
        (refusal(503, "not a word of the API"), "503 Service Unavailable", False),
        (Exchange("GET", f"{JOBS}/gpt", {}, None, 200, "no JSON"), "broken answer", False),
        (Exchange("GET", f"{JOBS}/gpt", {}, None, 200, "[1]"), "broken answer", False),
        (Exchange("GET", f"{JOBS}/gpt", {}, None, 302, "elsewhere"), "302 Found", False),
    ],
)
async def test_an_answer_that_is_an_error(
    made: Authority, exchange: Exchange, why: str, missing: bool
) -> None:
    async with played(made.context, exchange) as player:
        api = KubernetesApi(Cluster(server=player.url, authority=made.ca, token="abc"))
        answer = await api.get(JOB, "train", "gpt")
        assert (answer.why, answer.missing) == (why, missing)
        await api.close()


async def test_a_kind_that_is_not_known_there_is_no_job_that_is_gone(made: Authority) -> None:
    """The API server answers both with 404."""
    path = TRAIN_JOB.path("train", "gpt")
    exchange = Exchange("GET", path, {}, None, 404, "404 page not found")
    async with played(made.context, exchange) as player:
        api = KubernetesApi(Cluster(server=player.url, authority=made.ca, token="abc"))
        answer = await api.get(TRAIN_JOB, "train", "gpt")
        assert not answer.missing
        assert answer.why == (
            "404: the API server does not know trainjobs of trainer.kubeflow.org/v1alpha1"
        )
        await api.close()


async def test_how_long_the_server_wants_to_be_left_alone(made: Authority) -> None:
    async with played(made.context, refusal(429, "TooManyRequests")) as player:
        player.extra["Retry-After"] = "7"
        api = KubernetesApi(Cluster(server=player.url, authority=made.ca, token="abc"))
        answer = await api.get(JOB, "train", "gpt")
        assert (answer.why, answer.retry_after_ms) == ("429 TooManyRequests", 7000)
        await api.close()


async def test_pods_of_several_pages(made: Authority) -> None:
    query = {"limit": "100", "fieldSelector": f"{ALIVE},metadata.name=a", "labelSelector": "x=y"}
    first = {"metadata": {"continue": "next"}, "items": [pod("a"), pod("b", "Failed")]}
    second = {"metadata": {}, "items": [pod("c"), {"metadata": {}}, 7]}
    async with played(
        made.context,
        Exchange("GET", PODS, query, None, 200, first),
        Exchange("GET", PODS, query | {"continue": "next"}, None, 200, second),
    ) as player:
        api = KubernetesApi(Cluster(server=player.url, authority=made.ca, token="abc"))
        found = await api.pods("train", labelSelector="x=y", fieldSelector="metadata.name=a")
        assert isinstance(found, list)
        assert [one.name for one in found] == ["a", "c"]
        await api.close()


@pytest.mark.parametrize("answer", [{}, {"items": 7, "metadata": {}}, {"items": []}])
async def test_a_list_that_is_none(made: Authority, answer: dict[str, object]) -> None:
    query = {"limit": "100", "fieldSelector": ALIVE}
    async with played(made.context, Exchange("GET", PODS, query, None, 200, answer)) as player:
        api = KubernetesApi(Cluster(server=player.url, authority=made.ca, token="abc"))
        found = await api.pods("train")
        assert isinstance(found, Answer)
        assert found.why == "broken answer"
        await api.close()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("reset", "connection reset"),
        ("half", "connection reset"),
        ("timeout", "timeout"),
        ("drip", "timeout"),
    ],
)
async def test_a_server_that_fails_is_bounded_and_no_exception(
    made: Authority, fault: str, why: str
) -> None:
    async with fault_server(made.context) as server:
        cluster = Cluster(server=server.url(f"/{fault}?x="), authority=made.ca, token="abc")
        api = KubernetesApi(cluster, timeout_s=0.3)
        assert await api.get(JOB, "train", "gpt") == Answer(0, {}, why)
        await api.close()


async def test_metadata_addresses_are_refused() -> None:
    """Whatever a kubeconfig says: private addresses are allowed, these are not."""
    api = KubernetesApi(Cluster(server="https://169.254.169.254", token="abc"))
    assert "never allowed" in (await api.get(JOB, "train", "gpt")).why
    await api.close()


async def test_a_token_that_cannot_be_read(tmp_path: Path) -> None:
    api = KubernetesApi(Cluster(server="https://127.0.0.1:1", token=tmp_path / "token"))
    answer = await api.get(JOB, "train", "gpt")
    assert answer.why == "the token or a certificate cannot be read: No such file or directory"
    (tmp_path / "token").write_text("two words")
    answer = await api.get(JOB, "train", "gpt")
    assert answer.why == "the token or a certificate cannot be read: expected one word"
    await api.close()


async def test_certificates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    cluster = Cluster(server="https://127.0.0.1:1", authority=tmp_path / "ca.crt", token="abc")
    with pytest.raises(ssl.SSLError):
        cluster.tls()
    api = KubernetesApi(cluster)
    assert (await api.get(JOB, "train", "gpt")).status == 0
    await api.close()


def test_a_pod_without_a_time_is_none() -> None:
    assert Pod.read({"metadata": {"name": "a", "uid": "1", "creationTimestamp": "soon"}}) is None
