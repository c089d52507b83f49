"""A real SMTP server (aiosmtpd) on loopback that keeps the mail it is handed."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult


@dataclass
class Mailbox:
    """What came in. The replies are sent in their order, then 250.

    Attributes:
        recipients: answers to RCPT TO, by address.
        cut: how many times the connection is cut instead of an answer to DATA (the mail is kept).
        farewell: waited for before QUIT is answered.
    """

    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    to: list[list[str]] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    recipients: dict[str, list[str]] = field(default_factory=dict)
    cut: int = 0
    farewell: asyncio.Event | None = None
    logins: list[tuple[str, bool]] = field(default_factory=list)
    encrypted: list[bool] = field(default_factory=list)

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:
        if waiting := self.recipients.get(address):
            reply = waiting.pop(0)
            if not reply.startswith("250"):
                return reply
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        if self.replies:
            reply = self.replies.pop(0)
            if not reply.startswith("250"):
                return reply
        mail = message_from_bytes(envelope.content, policy=default)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        self.to.append(list(envelope.rcpt_tos))
        self.encrypted.append(session.ssl is not None or server.transport.get_extra_info("cipher"))
        if self.cut:
            self.cut -= 1
            server.transport.abort()
        return "250 OK"

    async def auth_XOAUTH2(self, server: Any, arguments: list[str]) -> AuthResult:
        return AuthResult(success=False, handled=False)

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:
        if self.farewell is not None:
            await self.farewell.wait()
        return "221 Bye"

    def authenticate(self, server: Any, session: Any, envelope: Any, way: str, data: Any) -> Any:
        good = (data.login, data.password) == (b"tocsin", b"planted-SECRET-mail")
        self.logins.append((way, good))
        return AuthResult(success=good, handled=False)


def hold_port() -> socket.socket:
    """A port of this machine that nobody else gets; connections to it are refused."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


@asynccontextmanager
async def smtp_server(
    *,
    starttls: ssl.SSLContext | None = None,
    tls: ssl.SSLContext | None = None,
    login: bool = False,
    without: Sequence[str] = (),
    bound: socket.socket | None = None,
) -> AsyncIterator[Mailbox]:
    """Listen on a free port of 127.0.0.1, in this event loop; `without` some ways to log in.

    `bound` is a socket that holds the port already, and refuses connections until now.
    """
    mailbox = Mailbox()
    held = bound or hold_port()

    def protocol() -> SMTP:
        return SMTP(
            mailbox,
            hostname="mail.test",
            tls_context=starttls,
            require_starttls=starttls is not None,
            # With TLS from the first byte aiosmtpd takes the connection for a plain one, and warns.
            auth_required=login and tls is None,
            auth_require_tls=tls is None,
            auth_exclude_mechanism=without,
            authenticator=mailbox.authenticate,
            loop=asyncio.get_running_loop(),
        )

    server = await asyncio.get_running_loop().create_server(
        protocol, sock=held, ssl=tls, start_serving=True
    )
    mailbox.port = server.sockets[0].getsockname()[1]
    try:
        yield mailbox
    finally:
        server.close()
        await server.wait_closed()


@contextmanager
def smtp_thread(bound: socket.socket | None = None) -> Iterator[Mailbox]:
    """The same in a thread of its own, for tests without an event loop."""
    up, over = threading.Event(), asyncio.Event()
    found: list[tuple[Mailbox, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with smtp_server(bound=bound) as mailbox:
            found.append((mailbox, asyncio.get_running_loop()))
            up.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="smtp", daemon=True)
    thread.start()
    assert up.wait(10), "the SMTP server did not start"
    mailbox, loop = found[0]
    try:
        yield mailbox
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
