"""A service that ends jobs, against the fault server: signed requests, and an end that is shown."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import SecretStr
from standardwebhooks import Webhook as StandardWebhook
from standardwebhooks.webhooks import WebhookVerificationError

from support.actions.target_jobs import STARTED_MS, target_job
from support.servers.certificates import authority
from support.servers.fault_server import FaultServer, fault_server
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext
from tocsin.actions.targets.webhook.config import WebhookStopTarget
from tocsin.actions.targets.webhook.kind import StopService, Webhook
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.runs import SchedulerJob

KEY = "whsec_c2lnbmluZy1rZXktb2YtdGVzdHM="
OLD_KEY = "whsec_dGhlLWtleS1iZWZvcmUtdGhpcy1vbmU="
JOB = target_job("lsf", {"job": "4711", "cluster": "a"})


def context(folder: Path = Path(), *, private: bool = True) -> TargetContext:
    return TargetContext(
        secrets={
            "key": SecretStr(KEY),
            "old": SecretStr(OLD_KEY),
            "token": SecretStr("planted-SECRET"),
        },
        guard=AddressGuard(private=private),
        folder=folder,
        environ={},
    )


@asynccontextmanager
async def service_at(
    server: FaultServer,
    stop: str = "/status/202",
    status: str = "/status/200",
    given: TargetContext | None = None,
    **more: Any,
) -> AsyncIterator[StopService]:
    """The target of a service, as it is configured."""
    config = WebhookStopTarget.model_validate(
        {
            "type": "webhook",
            "url": server.url(stop),
            "status_url": server.url(status),
            "sign": {"key": {"secret": "key"}},
            **more,
        }
    )
    service = Webhook().target("ops", config, given or context())
    try:
        yield service
    finally:
        await service.close()


def shows(state: str, incarnation: str = JOB.incarnation) -> Any:
    """A body that shows the job in that state."""
    return lambda _: json.dumps({"incarnation": incarnation, "state": state, "more": "SECRET"})


async def test_a_stop_is_a_signed_request_that_names_the_incarnation() -> None:
    headers = {"authorization": {"secret": "token"}}
    sign = {"key": {"secret": "key"}, "previous_key": {"secret": "old"}}
    async with (
        fault_server() as server,
        service_at(server, status="/status/200?tenant=a", headers=headers, sign=sign) as service,
    ):
        server.body = shows("running")
        assert await service.stop(JOB) == StopAsked("accepted", "the service answered 202 Accepted")
        assert await service.stop(JOB) == StopAsked("accepted", "the service answered 202 Accepted")

    look, first, _, second = server.seen
    query = parse_qs(urlsplit(look.path).query)
    assert query == {
        "tenant": ["a"],
        "run": ["gpt/2"],
        "incarnation": [JOB.incarnation],
        "stop": ["d-1"],
    }
    assert json.loads(first.body) == {
        "type": "tocsin.stop",
        "stop": "d-1",
        "run": "gpt/2",
        "incarnation": JOB.incarnation,
        "job": {"scheduler": "lsf", "names": {"job": "4711", "cluster": "a"}},
        "started_ms": STARTED_MS,
        "reason": "NaN in the loss at step 1",
    }
    for request in (look, first, second):
        assert request.headers["authorization"] == "planted-SECRET"
    # Who has seen the id has seen the request; and either key verifies it.
    assert [one.headers["webhook-id"] for one in (first, second)] == ["d-1", "d-1"]
    for key in (KEY, OLD_KEY):
        StandardWebhook(key).verify(first.body, first.headers)
    forged = first.body.replace(b"gpt/2", b"gpt/3")
    with pytest.raises(WebhookVerificationError):
        StandardWebhook(KEY).verify(forged, first.headers)


@pytest.mark.parametrize("state", ["running", "ended", "replaced", "unknown"])
async def test_the_status_url_shows_the_state(state: str) -> None:
    async with fault_server() as server, service_at(server) as service:
        server.body = shows(state)
        seen = await service.inspect(JOB)
    assert seen == JobSeen(state, f"the service answered: {state}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "result"), [("ended", "accepted"), ("replaced", "refused"), ("unknown", "accepted")]
)
async def test_a_job_that_is_over_is_not_asked_for(state: str, result: str) -> None:
    async with fault_server() as server, service_at(server) as service:
        server.body = shows(state)
        asked = await service.stop(JOB)
    assert asked.result == result
    # A service that cannot tell yet is asked: the request names the incarnation.
    assert len(server.seen) == (2 if state == "unknown" else 1)


@pytest.mark.parametrize(
    "body",
    [
        '{"state": "ended"}',
        '{"incarnation": "another", "state": "ended"}',
        json.dumps({"incarnation": JOB.incarnation, "state": "SECRET"}),
        json.dumps({"incarnation": JOB.incarnation, "state": ["ended"]}),
        json.dumps([JOB.incarnation, "ended"]),
        "ended",
        "[" * 100_000,
    ],
)
async def test_a_page_that_is_not_about_this_incarnation_confirms_nothing(body: str) -> None:
    async with fault_server() as server, service_at(server) as service:
        server.body = lambda _: body
        seen = await service.inspect(JOB)
    assert seen.state == "unknown"
    assert "SECRET" not in seen.reason


@pytest.mark.parametrize(
    ("path", "result", "words"),
    [
        ("/status/204", "accepted", "204"),
        ("/status/503", "failed", "503 Service Unavailable"),
        ("/status/429?after=7", "failed", "429 Too Many Requests"),
        ("/reset", "failed", "connection reset"),
        ("/status/403", "refused", "403 Forbidden"),
        ("/status/302", "refused", "redirects are not followed"),
    ],
)
async def test_what_the_service_answers_decides(path: str, result: str, words: str) -> None:
    async with fault_server() as server, service_at(server, stop=path) as service:
        server.body = shows("running")
        asked = await service.stop(JOB)
    assert asked.result == result
    assert words in asked.reason
    assert asked.retry_after_ms == (7_000 if "after" in path else None)
    assert "SECRET" not in asked.reason


@pytest.mark.parametrize("path", ["/status/503", "/status/404", "/reset", "/half"])
async def test_a_status_that_cannot_be_read_is_unknown(path: str) -> None:
    async with fault_server() as server, service_at(server, status=path) as service:
        server.body = shows("ended")
        seen = await service.inspect(JOB)
    assert seen.state == "unknown"


async def test_the_client_certificate_is_shown_to_both(tmp_path: Path) -> None:
    there, ours = authority(tmp_path / "s", "127.0.0.1"), authority(tmp_path / "c", "tocsin")
    there.context.verify_mode = ssl.CERT_REQUIRED
    there.context.load_verify_locations(ours.ca)
    files = {"ca": "s/ca.pem", "certificate": "c/server.pem", "key": "c/server.pem"}
    async with fault_server(there.context) as server:
        server.body = shows("running")
        async with service_at(server, given=context(tmp_path), tls=files) as service:
            assert (await service.stop(JOB)).result == "accepted"
        async with service_at(server, given=context(tmp_path), tls={"ca": "s/ca.pem"}) as service:
            assert (await service.inspect(JOB)).state == "unknown"
            assert (await service.stop(JOB)).result == "failed"
    assert len(server.seen) == 2


async def test_a_guarded_address_is_not_connected_to() -> None:
    async with (
        fault_server() as server,
        service_at(server, given=context(private=False)) as service,
    ):
        assert (await service.inspect(JOB)).state == "unknown"
        assert (await service.stop(JOB)).result == "refused"
    assert server.seen == []


def config(**more: Any) -> WebhookStopTarget:
    given = {
        "type": "webhook",
        "url": "https://jobs.example.com/stop",
        "status_url": "https://jobs.example.com/status",
        "sign": {"key": {"secret": "key"}},
        **more,
    }
    return WebhookStopTarget.model_validate(given)


def test_what_can_be_configured() -> None:
    kind = Webhook()
    wrong = config(status_url="http://x", tls={}, headers={"webhook-id": "1"})
    assert [one.loc for one in kind.check(wrong, ())] == [("tls",), ("headers", "webhook-id")]
    some = config(schedulers=["lsf", "pbs"])
    assert kind.can_end(some, JOB.scheduler)
    assert not kind.can_end(some, SchedulerJob(kind="slurm"))
    assert kind.can_end(config(), SchedulerJob(kind="slurm"))


def test_a_service_whose_secrets_are_missing_is_refused() -> None:
    bare = replace(context(), secrets={})
    with pytest.raises(ConfigurationError, match="target 'ops': signing is configured, but"):
        Webhook().target("ops", config(), bare)
    with pytest.raises(ConfigurationError, match="target 'ops': there is no URL"):
        Webhook().target("ops", config(url={"secret": "url"}), bare)
