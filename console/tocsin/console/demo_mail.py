"""A real SMTP server on loopback for the demo: keeps each mail, and writes its HTML to a file."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from dataclasses import dataclass
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aiosmtpd.smtp import SMTP

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail. `at_ms` is this machine's clock (Unix, milliseconds); `html` is where it lies."""

    subject: str
    issue_id: str
    html: Path
    at_ms: int


class DemoMailbox:
    """Listens on a free port of 127.0.0.1 between `async with`, and writes into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.mails: list[Mail] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: SMTP(self, hostname="demo.invalid", loop=loop), "127.0.0.1", 0
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        """Called by aiosmtpd with each mail."""
        mail = message_from_bytes(envelope.content, policy=default)
        assert isinstance(mail, EmailMessage)
        issue_id = str(mail["X-Tocsin-Issue"])
        name = _UNSAFE.sub("-", f"mail-{len(self.mails) + 1}-{mail['X-Tocsin-Run']}.html")
        path = self._folder / name
        path.write_text(page_of(mail), encoding="utf-8")
        now_ms = time.time_ns() // 1_000_000
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
