"""Webhooks against a real server with real faults."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from cloudevents.core.v1.event import CloudEvent
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr
from standardwebhooks.webhooks import Webhook as Verifier

from support.certificates import authority
from support.fault_server import FaultServer, fault_server
from support.issue_records import issue
from support.notices import notice
from tocsin.actions.delivery.retry import Outcome, RetryPolicy, decide
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.actions.receivers.http import HttpPoster, tls_context
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.webhook.config import WebhookReceiver
from tocsin.actions.receivers.webhook.kind import Webhook
from tocsin.actions.receivers.webhook.sender import WebhookSender, WebhookTarget
from tocsin.schemas.configuration.sections import TlsConfig
from tocsin.schemas.errors import ConfigurationError

KEY = SecretStr("a-signing-SECRET")
NOW_MS = int(datetime.now(UTC).timestamp() * 1000)
NOTICE = notice(issue(), kind="webhook")


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    async with fault_server() as server:
        yield server


@pytest.fixture
async def sender() -> AsyncIterator[WebhookSender]:
    sender = WebhookSender(HttpPoster(AddressGuard(private=True), timeout_s=0.4))
    yield sender
    await sender.close()


def target(url: str) -> WebhookTarget:
    return WebhookTarget("ml", SecretStr(url), {"authorization": SecretStr("Bearer T")}, (KEY,))


async def post(sender: WebhookSender, url: str) -> Outcome:
    now_ms = time.time_ns() // 1_000_000  # the signature is worth nothing minutes later
    return await sender.send(target(url), replace(NOTICE, now_ms=now_ms))


STATES = {
    **dict.fromkeys([200, 202, 204], "delivered"),
    **dict.fromkeys([301, 307, 400, 401, 403, 404, 409, 410, 413, 422], "rejected"),
    **dict.fromkeys([408, 425, 429, 500, 502, 503, 504], "pending"),
}


@pytest.mark.parametrize("status", STATES)
async def test_each_status_has_its_state(
    server: FaultServer, sender: WebhookSender, status: int
) -> None:
    outcome = await post(sender, server.url(f"/status/{status}"))

    assert outcome.status == status
    decision = decide(
        outcome,
        delivery_id="d-1",
        attempts=1,
        now_ms=NOW_MS,
        give_up_ms=NOW_MS + 86_400_000,
        policy=RetryPolicy(),
    )
    assert decision.state == STATES[status]
    assert len(server.seen) == 1, "a redirect was followed"


@pytest.mark.parametrize("after", ["7", "Sat%2C%2021%20Nov%202099%2014:00:00%20GMT"])
async def test_retry_after_is_read(server: FaultServer, sender: WebhookSender, after: str) -> None:
    outcome = await post(sender, server.url(f"/status/429?after={after}"))
    assert outcome.retry_after in ("7", "Sat, 21 Nov 2099 14:00:00 GMT")


@pytest.mark.parametrize(
    ("path", "failure"),
    [("/timeout", "timeout"), ("/drip", "timeout"), ("/reset", "connection reset")],
)
async def test_faults_of_the_connection_are_named(
    server: FaultServer, sender: WebhookSender, path: str, failure: str
) -> None:
    assert (await post(sender, server.url(path))).failure == failure


async def test_nobody_there_no_such_name_no_tls(server: FaultServer, sender: WebhookSender) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert (await post(sender, f"http://127.0.0.1:{port}/")).failure == "connection refused"
    assert (await post(sender, "http://nobody.invalid/")).failure == "name not found"
    failure = (await post(sender, server.url("/x").replace("http:", "https:"))).failure
    assert failure in ("TLS certificate not accepted", "timeout", "connection reset")


async def test_the_body_is_the_issue_and_the_signature_verifies(
    server: FaultServer, sender: WebhookSender
) -> None:
    await post(sender, server.url("/status/200"))

    (request,) = server.seen
    Verifier(KEY.get_secret_value().encode()).verify(request.body, request.headers)
    assert request.headers["webhook-id"] == NOTICE.delivery.delivery_id
    assert request.headers["authorization"] == "Bearer T"
    event = from_http_event(HTTPMessage(request.headers, request.body))
    assert isinstance(event, CloudEvent)
    assert event.get_type() == "tocsin.issue.firing"
    data = event.get_data()
    assert isinstance(data, dict)
    assert data["reason"] == "NaN in the loss at step 1"


async def test_the_client_certificate_is_shown_and_our_authority_trusted(tmp_path: Path) -> None:
    server, client = authority(tmp_path / "s", "127.0.0.1"), authority(tmp_path / "c", "tocsin")
    server.context.verify_mode = ssl.CERT_REQUIRED
    server.context.load_verify_locations(client.ca)
    context = ReceiverContext(
        secrets={}, guard=AddressGuard(private=True), folder=tmp_path, environ={}
    )
    kind = Webhook()
    sender = kind.sender(context)

    async def outcome(url: str, **files: str) -> Outcome:
        config = WebhookReceiver.model_validate({"type": "webhook", "url": url, "tls": files})
        target = kind.target("ml", config, context)
        assert target is not None
        return await sender.send(target, NOTICE)

    ours = {"certificate": "c/server.pem", "key": "c/server.pem"}
    try:
        async with fault_server(server.context) as there:
            url = there.url("/status/200")
            assert (await outcome(url, ca="s/ca.pem", **ours)).status == 200
            # Nobody of ours is let in without a certificate, and no server without its authority.
            assert (await outcome(url, ca="s/ca.pem")).failure is not None
            failure = (await outcome(url, **ours)).failure
            assert failure == "TLS certificate not accepted"
            assert len(there.seen) == 1
    finally:
        await sender.close()


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("planted-SECRET")
    locked = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    authority(tmp_path, "127.0.0.1")
    for file in ("bad.pem", "locked.pem", "none.pem"):
        for config in (TlsConfig(ca=Path(file)), _client(file)):
            with pytest.raises(ConfigurationError) as caught:
                tls_context(config, folder=tmp_path, receiver="ml")
            assert "receiver 'ml'" in str(caught.value)
            assert file in str(caught.value)
            assert "SECRET" not in str(caught.value)


def _client(key: str) -> TlsConfig:
    return TlsConfig(certificate=Path("server.pem"), key=Path(key))


async def test_a_refused_address_is_never_connected_to(server: FaultServer) -> None:
    sender = WebhookSender(HttpPoster(AddressGuard(private=False)))
    try:
        for host in ("127.0.0.1", "localhost", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"):
            outcome = await post(sender, f"http://{host}:{server.port}/status/200")
            assert outcome.forbidden is not None, host
    finally:
        await sender.close()
    assert server.seen == []


async def test_a_name_that_changes_its_address_is_caught(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def rebinding(host: object, *args: object, **more: object) -> object:
        return real("127.0.0.1" if host == "rebind.example" else host, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    sender = WebhookSender(HttpPoster(AddressGuard(private=False)))
    allowed = WebhookSender(
        HttpPoster(AddressGuard(private=False, allow=parse_networks(["127.0.0.0/8"])))
    )
    url = f"http://rebind.example:{server.port}/status/200"
    try:
        assert (await post(sender, url)).forbidden is not None
        assert server.seen == []
        assert (await post(allowed, url)).status == 200
    finally:
        await sender.close()
        await allowed.close()


async def test_no_secret_is_in_an_outcome_or_a_log(
    server: FaultServer, sender: WebhookSender, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    for path in ("/status/503", "/reset", "/timeout", "/status/307", "/status/200"):
        outcome = await post(sender, server.url(f"{path}?token=SECRET-IN-URL"))
        shown.append(repr(outcome) + outcome.text())
    shown.append(repr(await post(sender, "http://127.0.0.1:1/?token=SECRET-IN-URL")))
    shown.append(repr(target(server.url("/?token=SECRET-IN-URL"))))

    text = "\n".join([*shown, caplog.text])
    assert "SECRET" not in text
    assert "Bearer T" not in text
