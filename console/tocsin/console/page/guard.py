"""What each request must pass before a page sees it, and what each answer says to the browser.

In this order: the connection is of this user (on loopback), the `Host` is one of ours, there is a
session (where a token is asked for), and whoever writes comes from our own page with the page's
secret. Nothing of it needs the bus.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from tocsin.console.page.addresses import Address, host_of, may_be_asked_as
from tocsin.console.page.loopback_users import is_stranger
from tocsin.console.page.sessions import Token
from tocsin.schemas.monotonic_clock import unix_ms

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
"""The Content-Security-Policy of all pages: what is not a file of ours does not run or show."""

HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-Robots-Tag": "noindex",
}

CSRF_HEADER: Final = "x-tocsin-csrf"
OPEN_PATHS: Final = ("/login", "/healthz")
OPEN_FOLDER: Final = "/static/"
"""What is served without a session; nothing of it comes from the bus."""

_READING: Final = frozenset({"GET", "HEAD"})
_WRITING: Final = frozenset({"POST"})


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the page.

    Args:
        address: where it listens.
        token: None: only who is on this machine, as this user, and without a name of their own.
        names: other names under which it may be asked for, in lower case.
        person: who answers where nobody logs in.
        csrf: the secret of this page that each writing request repeats. Other sites cannot read it;
            people who can are all allowed to write.
    """

    address: Address
    person: str
    token: Token | None = None
    names: Collection[str] = ()
    csrf: str = field(default_factory=secrets.token_urlsafe)

    def person_of(self, cookie: str, authorization: str, now_s: float) -> str | None:
        """Who asks; None: nobody whom we know."""
        if self.token is None:
            return self.person
        kind, _, given = authorization.partition(" ")
        if kind.lower() == "bearer" and self.token.fits(given):
            return f"token of {self.person}"
        return self.token.person_of(_cookie(cookie, self.token.cookie_name), now_s)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served."""

    status: int
    text: str


def refusal_of(method: str, host: str, site: str, origin: str, access: Access) -> Refusal | None:
    """What is wrong with a request by its headers; None: nothing. Pure.

    Args:
        host: `Host`; site: `Sec-Fetch-Site`; origin: `Origin`; each empty if it is not there.
    """
    if not may_be_asked_as(host, access.address, access.names):
        return Refusal(
            421,
            f"This page is not served under the name {(host_of(host) or host)[:100]!r}. Use "
            f"{access.address.url}, or start it with --host-name.",
        )
    if method in _READING:
        return None
    if method not in _WRITING:
        return Refusal(405, "This page answers GET and POST.")
    if site not in ("", "same-origin", "none"):
        return Refusal(403, "Another site has sent this. Nothing was done.")
    if origin and urlsplit(origin).netloc.lower() != host.strip().lower():
        return Refusal(403, "Another site has sent this. Nothing was done.")
    return None


class Guard:
    """An ASGI middleware around all of the page.

    Args:
        login: answers a request without a session.
        stranger: whether another user of this machine has that connection (address and port, and
            our port).
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        login: Callable[[Request], Awaitable[Response]],
        stranger: Callable[[tuple[str, int], int], bool] = is_stranger,
    ) -> None:
        self._app = app
        self._access = access
        self._login = login
        self._stranger = stranger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                have = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in (*HEADERS.items(), ("Cache-Control", "no-store"))
                        if name.lower().encode() not in have
                    ),
                ]
            await send(message)

        app = await self._answering(scope, receive)
        await app(scope, receive, send_with_headers)

    async def _answering(self, scope: Scope, receive: Receive) -> ASGIApp:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        access, request = self._access, Request(scope, receive)
        headers = request.headers
        if access.token is None and access.address.loopback and self._is_stranger(scope):
            text = "This page belongs to another user of this machine, who can share it by a token."
            return PlainTextResponse(f"{text}\n", 403)
        hosts = headers.getlist("host")
        refusal = refusal_of(
            request.method,
            hosts[0] if len(hosts) == 1 else "",
            headers.get("sec-fetch-site", ""),
            headers.get("origin", ""),
            access,
        )
        if refusal is not None:
            return PlainTextResponse(f"{refusal.text}\n", refusal.status)
        person = access.person_of(
            headers.get("cookie", ""), headers.get("authorization", ""), unix_ms() / 1000
        )
        # Not that of `request.url`: older versions of starlette read it from the Host header.
        path = str(scope["path"])
        if person is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            return await self._login(request)
        scope.setdefault("state", {})["person"] = person
        return self._app

    def _is_stranger(self, scope: Scope) -> bool:
        client, server = scope.get("client"), scope.get("server")
        if client is None or server is None or server[1] is None:
            return False
        # Asked for each request: the next connection from that port may be somebody else's.
        return self._stranger((str(client[0]), int(client[1])), int(server[1]))


def csrf_fits(given: str, access: Access) -> bool:
    """Whether a writing request comes from a page of ours."""
    return hmac.compare_digest(given.encode(), access.csrf.encode())


def _cookie(header: str, name: str) -> str:
    """The value of that cookie, whatever other applications of this host have in theirs."""
    for part in header.split(";"):
        found, _, value = part.partition("=")
        if found.strip() == name:
            return value.strip().strip('"')
    return ""
