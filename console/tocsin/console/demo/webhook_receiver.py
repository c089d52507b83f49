"""A real HTTP receiver on loopback for the demo: verifies each webhook and notes when it came."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from aiohttp import web

from tocsin.schemas.errors import RecordError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.issues import IssueFiring


@dataclass(frozen=True, slots=True)
class Received:
    """One webhook. `at_ms` is this machine's clock (Unix, milliseconds)."""

    webhook_id: str
    verified: bool
    issue: IssueFiring | None
    at_ms: int


class DemoReceiver:
    """Where the webhooks of the demo arrive. `url` is known while it listens."""

    def __init__(self) -> None:
        self._raw_key = secrets.token_bytes(24)
        self.secret = "whsec_" + base64.b64encode(self._raw_key).decode()
        self.received: list[Received] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Self]:
        """Listen, on a free port of 127.0.0.1, until the `async with` ends."""
        application = web.Application()
        application.router.add_post("/hook", self._accept)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}/hook"
            yield self
        finally:
            await runner.cleanup()

    async def _accept(self, request: web.Request) -> web.Response:
        body = await request.read()
        webhook_id = request.headers.get("webhook-id", "")
        verified = self._verify(
            webhook_id,
            request.headers.get("webhook-timestamp", ""),
            request.headers.get("webhook-signature", ""),
            body,
        )
        self.received.append(Received(webhook_id, verified, _issue(body), unix_ms()))
        return web.Response(status=204 if verified else 401)

    def _verify(self, webhook_id: str, timestamp: str, signatures: str, body: bytes) -> bool:
        """Standard Webhooks, symmetric: HMAC-SHA256 over `id.timestamp.body`."""
        signed = f"{webhook_id}.{timestamp}.".encode() + body
        wanted = base64.b64encode(hmac.digest(self._raw_key, signed, hashlib.sha256)).decode()
        return any(
            hmac.compare_digest(f"v1,{wanted}", signature) for signature in signatures.split()
        )


def _issue(body: bytes) -> IssueFiring | None:
    try:
        data = EVENT_TYPES.decode(body).data
    except RecordError:
        return None
    return data if isinstance(data, IssueFiring) else None
