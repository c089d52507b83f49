"""One POST to a guarded address; and kinds of receivers that are posted JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import JsonValue, SecretStr

from tocsin.actions.decision.retry import Failure, Outcome, phrase_of
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.address_guard import AddressGuard, watching
from tocsin.actions.receivers.kind import ConfigT, ReceiverContext, ReceiverKind
from tocsin.schemas.configuration.sections import TlsConfig
from tocsin.schemas.configuration.values import parse_http_url
from tocsin.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

Method = Literal["GET", "POST", "PATCH", "PUT", "DELETE"]

TIMEOUT_S: Final = 15.0
"""For one attempt as a whole."""

LONGEST_ANSWER: Final = 64 * 1024
"""Bytes that are read of an answer."""

_MAX_URLS: Final = 1_000

_PLAIN: Final = {"accept-encoding": "identity"}
"""Answers are read as they come: without this, aiohttp asks for compressed ones."""


class HttpPoster:
    """Posts, with one session; `close` it at the end."""

    def __init__(
        self, guard: AddressGuard, *, software: str = "tocsin", timeout_s: float = TIMEOUT_S
    ) -> None:
        self._guard = guard
        self._software = software
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[SecretStr, URL] = {}

    async def post(
        self,
        url: SecretStr,
        body: bytes,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> Outcome:
        """One attempt, of at most 15 s. Raises nothing but CancelledError.

        What the receiver answers beyond its status is not read, so it can be logged nowhere.

        Args:
            tls: whom to trust and who we are, if not the system's authorities and nobody.
        """
        outcome, _ = await self._exchange("POST", url, body, headers, tls=tls, read=0)
        return outcome

    async def ask(
        self,
        method: Method,
        url: SecretStr,
        body: Mapping[str, JsonValue] | None = None,
        token: SecretStr | None = None,
        *,
        headers: Mapping[str, SecretStr] | None = None,
        tls: ssl.SSLContext | None = None,
        longest: int = LONGEST_ANSWER,
    ) -> tuple[Outcome, JsonValue]:
        """One attempt, with JSON if there is a body, and the JSON that is answered; None if it is
        none.

        Of an answer only ids and states may be kept: nothing of it belongs into an outcome.

        Args:
            tls: as for `post`.
            longest: bytes that are read of the answer.
        """
        sent = {name: value.get_secret_value() for name, value in (headers or {}).items()}
        if body is not None:
            sent.setdefault("content-type", "application/json; charset=utf-8")
        if token is not None:
            sent["authorization"] = f"Bearer {token.get_secret_value()}"
        outcome, answer = await self._exchange(
            method,
            url,
            None if body is None else json.dumps(body, ensure_ascii=False).encode(),
            sent,
            tls=tls,
            read=longest,
        )
        try:
            return outcome, json.loads(answer)
        except (ValueError, RecursionError):
            return outcome, None

    async def _exchange(
        self,
        method: Method,
        url: SecretStr,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext | None = None,
        read: int,
    ) -> tuple[Outcome, bytes]:
        """One request, and at most `read` bytes of what is answered to it."""
        import aiohttp

        with watching() as tried:
            try:
                async with (
                    asyncio.timeout(self._timeout_s),
                    self._open().request(
                        method,
                        self._parsed(url),
                        data=body,
                        headers={"user-agent": self._software, **_PLAIN, **headers},
                        allow_redirects=False,
                        ssl=True if tls is None else tls,
                    ) as response,
                ):
                    outcome = Outcome(
                        status=response.status,
                        phrase=phrase_of(response.status),
                        retry_after=response.headers.get("Retry-After"),
                    )
                    return outcome, await _start(response, read)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                if tried.why_refused is not None:
                    return Outcome(forbidden=tried.why_refused), b""
                if isinstance(error, aiohttp.InvalidURL):
                    return Outcome(forbidden="the URL cannot be used"), b""
                return Outcome(failure=failure_of(error)), b""

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _parsed(self, url: SecretStr) -> URL:
        """A URL, parsed once: a receiver has the same one each time."""
        import aiohttp
        from yarl import URL

        found = self._urls.get(url)
        if found is None:
            try:
                found = URL(url.get_secret_value())
            except ValueError:
                raise aiohttp.InvalidURL("") from None
            if len(self._urls) >= _MAX_URLS:
                self._urls.clear()
            self._urls[url] = found
        return found

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
                # One timer an attempt: `_exchange` has it.
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._session


@dataclass(frozen=True, slots=True)
class JsonTarget:
    """A receiver that is posted JSON: what `body` makes of a notice. It raises RecordError."""

    url: SecretStr
    body: Callable[[Notice], JsonValue]
    headers: Mapping[str, SecretStr] = field(default_factory=dict)


class JsonSender:
    """Posts JSON. One per service; `close` it at the end."""

    def __init__(self, poster: HttpPoster) -> None:
        self._poster = poster

    async def send(self, target: JsonTarget, notice: Notice) -> Outcome:
        """One attempt. Raises RecordError: the notice holds no issue."""
        body = json.dumps(target.body(notice), ensure_ascii=False).encode()
        headers = {name: value.get_secret_value() for name, value in target.headers.items()}
        return await self._poster.post(
            target.url, body, {"content-type": "application/json; charset=utf-8", **headers}
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()


class JsonKind(ReceiverKind[ConfigT, JsonTarget]):
    """A kind of receiver that is posted JSON."""

    libraries = ("aiohttp",)

    def sender(self, context: ReceiverContext) -> JsonSender:
        """One session for all receivers of the kind."""
        return JsonSender(HttpPoster(context.guard, software=context.software))


async def _start(response: aiohttp.ClientResponse, most: int) -> bytes:
    """At most so many bytes of an answer."""
    found = b""
    while len(found) < most and (more := await response.content.read(most - len(found))):
        found += more
    return found


def http_url(url: SecretStr, what: str) -> SecretStr:
    """The URL of a receiver or a target, checked where it comes from a secret.

    `what` it is, with its name, begins the message.

    Raises:
        ConfigurationError: it is no http(s) URL; the message does not repeat it.
    """
    try:
        parse_http_url(url.get_secret_value())
    except ValueError as error:
        raise ConfigurationError(f"{what}: {error}") from None
    return url


def tls_context(config: TlsConfig, *, folder: Path, what: str) -> ssl.SSLContext:
    """What a server is checked with, and what it is shown. Reads the files: may block.

    `what` needs it, with its name, begins the message.

    Raises:
        ConfigurationError: a file cannot be used. The message shows nothing of it.
    """
    paths = [
        None if path is None else str(folder / path)
        for path in (config.ca, config.certificate, config.key)
    ]
    ca, certificate, key = paths
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        why = error.strerror if error.filename or not isinstance(error, ssl.SSLError) else None
        raise ConfigurationError(
            f"{what}: cannot use the TLS files {', '.join(filter(None, paths))}: "
            f"{why or 'expected PEM files, the key without a password'}"
        ) from None
    return context


def bearer(token: SecretStr) -> dict[str, SecretStr]:
    """The header that logs in with a token."""
    return {"authorization": SecretStr(f"Bearer {token.get_secret_value()}")}


def failure_of(error: Exception) -> Failure:
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
