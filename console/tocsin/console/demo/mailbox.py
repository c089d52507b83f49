"""A real SMTP server on loopback for the demo: keeps each mail, and writes its HTML to a file."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import Any, Final, Self

from aiosmtpd.smtp import SMTP

from tocsin.schemas.monotonic_clock import unix_ms

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail. `at_ms` is this machine's clock (Unix, milliseconds); `html` is where it lies."""

    subject: str
    issue_id: str
    html: Path
    at_ms: int


class DemoMailbox:
    """Where the mail of the demo arrives; it is kept in `folder`. `port` while it listens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.mails: list[Mail] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Self]:
        """Listen, on a free port of 127.0.0.1, until the `async with` ends."""
        loop = asyncio.get_running_loop()
        async with await loop.create_server(
            lambda: SMTP(self, hostname="demo.invalid", loop=loop), "127.0.0.1", 0
        ) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        """Called by aiosmtpd with each mail."""
        mail = message_from_bytes(envelope.content, policy=default)
        assert isinstance(mail, EmailMessage)
        issue_id = str(mail["X-Tocsin-Issue"])
        name = _UNSAFE.sub("-", f"mail-{len(self.mails) + 1}-{mail['X-Tocsin-Run']}.html")
        path = self._folder / name
        path.write_text(page_of(mail), encoding="utf-8")
        now_ms = unix_ms()
        self.mails.append(Mail(str(mail["Subject"]), issue_id, path, now_ms))
        return "250 OK"


def page_of(mail: EmailMessage) -> str:
    """The HTML of a mail as a page of its own, with its picture inside."""
    page = ""
    pictures: dict[str, str] = {}
    for part in mail.walk():
        if part.get_content_type() == "text/html":
            page = part.get_content()
        elif part.get_content_type() == "image/png":
            encoded = base64.b64encode(part.get_content()).decode()
            pictures[str(part["Content-ID"]).strip("<>")] = f"data:image/png;base64,{encoded}"
    for name, url in pictures.items():
        page = page.replace(f"cid:{name}", url)
    return page
