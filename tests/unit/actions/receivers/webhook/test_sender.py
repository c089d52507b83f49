"""Webhooks against a real server with real faults."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from cloudevents.core.v1.event import CloudEvent
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr
from standardwebhooks.webhooks import Webhook as Verifier

from support.actions.faults import FAULTS, Fault
from support.actions.notices import notice
from support.records.issues import issue
from support.servers.certificates import Authority, authority
from support.servers.fault_server import FaultServer, fault_server
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.actions.receivers.http import HttpPoster, tls_context
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.webhook.config import WebhookReceiver
from tocsin.actions.receivers.webhook.kind import Webhook
from tocsin.actions.receivers.webhook.sender import WebhookSender, WebhookTarget
from tocsin.schemas.configuration.sections import TlsConfig
from tocsin.schemas.errors import ConfigurationError

KEY = SecretStr("a-signing-SECRET")
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


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_each_fault_of_a_real_server_has_its_outcome(
    server: FaultServer, sender: WebhookSender, foreign: Authority, fault: Fault
) -> None:
    match fault.path:
        case "wrong TLS":
            async with await asyncio.start_server(
                lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=foreign.context
            ) as tls:
                outcome = await post(sender, f"https://127.0.0.1:{port_of(tls)}/")
        case "nobody there":
            async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1") as gone:
                port = port_of(gone)
            outcome = await post(sender, f"http://127.0.0.1:{port}/")
        case "no such name":
            outcome = await post(sender, "http://nobody.invalid/")
        case path:
            outcome = await post(sender, server.url(path))
            assert len(server.seen) == 1, "a redirect was followed"

    assert outcome == fault.outcome


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def test_a_server_without_tls_is_tried_again(
    server: FaultServer, sender: WebhookSender
) -> None:
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
                tls_context(config, folder=tmp_path, what="receiver 'ml'")
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
