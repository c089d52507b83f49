"""Webhooks: one attempt is one POST of the issue's CloudEvent, signed, to a guarded address."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pydantic import SecretStr

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.retry import Failure, Outcome, phrase_of
from tocsin.actions.receivers.address_guard import AddressGuard, watching
from tocsin.actions.receivers.webhook.signature import sign

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S: Final = 15.0
"""For one attempt as a whole."""

CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """A receiver. Everything that may be secret is wrapped, the URL too: some hold a token."""

    name: str
    url: SecretStr
    headers: Mapping[str, SecretStr] = field(default_factory=dict)
    keys: tuple[SecretStr, ...] = ()
    """The signing key, and behind it the one before while they are being replaced."""


class WebhookSender:
    """Posts. One per service; `close` it at the end."""

    def __init__(
        self, guard: AddressGuard, *, software: str = "tocsin", timeout_s: float = TIMEOUT_S
    ) -> None:
        self._guard = guard
        self._software = software
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def send(self, target: WebhookTarget, notice: Notice) -> Outcome:
        """One attempt, of at most 15 s. Raises nothing but CancelledError.

        What the receiver answers beyond its status is not read, so it can be logged nowhere.
        """
        import aiohttp

        delivery_id = notice.delivery.delivery_id
        event = notice.delivery.event or {}
        body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {name: value.get_secret_value() for name, value in target.headers.items()}
        timestamp_s = notice.now_ms // 1000
        headers |= {
            "content-type": CONTENT_TYPE,
            "user-agent": self._software,
            "webhook-id": delivery_id,
            "webhook-timestamp": str(timestamp_s),
        }
        if target.keys:
            headers["webhook-signature"] = sign(
                target.keys, id=delivery_id, timestamp_s=timestamp_s, body=body
            )
        with watching() as tried:
            try:
                async with (
                    asyncio.timeout(self._timeout_s),
                    self._open().post(
                        target.url.get_secret_value(),
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                    ) as response,
                ):
                    return Outcome(
                        status=response.status,
                        phrase=phrase_of(response.status),
                        retry_after=response.headers.get("Retry-After"),
                    )
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                if tried.why_refused is not None:
                    return Outcome(forbidden=tried.why_refused)
                if isinstance(error, aiohttp.InvalidURL):
                    return Outcome(forbidden="the URL cannot be used")
                return Outcome(failure=_failure(error))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, socket_factory=self._guard.socket, ttl_dns_cache=10
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Not a proxy of the environment: it would connect where the guard does not see.
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                auto_decompress=False,
            )
        return self._session


def _failure(error: Exception) -> Failure:
    """The kind of failure. Never the error's own words: they name hosts and quote answers."""
    import aiohttp

    cause = getattr(error, "os_error", None) or error
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(
        error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError | ssl.SSLError
    ):
        return "TLS certificate not accepted"
    if isinstance(error, aiohttp.ClientConnectorDNSError) or isinstance(cause, socket.gaierror):
        return "name not found"
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    if isinstance(cause, ConnectionError) or isinstance(error, aiohttp.ServerDisconnectedError):
        return "connection reset"
    if isinstance(error, aiohttp.ClientConnectionError | OSError):
        return "no connection"
    return "broken answer"
