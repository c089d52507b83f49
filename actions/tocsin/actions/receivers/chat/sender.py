"""Chat: one attempt is one message through apprise, in a child process that is guarded."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.retry import Outcome, phrase_of
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.chat.child import Result, Task
from tocsin.actions.receivers.message import Message, message_for
from tocsin.actions.receivers.templates.template import Template, words_of
from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.schemas.records.events import clip

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 40.0
"""For one attempt as a whole, the start of the child included."""

AT_ONCE: Final = 2
"""Children at a time: each costs a second of a core."""

_BODY: Final = 1_500
_MODULE: Final = "tocsin.actions.receivers.chat.child"
_ROWS: Final = frozenset(
    {"Where first", "Since", "Over since", "Seen again", "How bad", "What followed", "Caused by",
     "Good checkpoint", "What tocsin did", "What to try", "Labels", "Issue"}
)  # fmt: skip
_MARKDOWN: Final = re.compile(r"([\\*_~`|#>\[\]()])")


@dataclass(frozen=True, slots=True)
class ChatTarget:
    """A receiver. The URL is secret: most hold a token."""

    name: str
    url: SecretStr
    template: Template | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlace:
    """For tests: where hosts are really to be looked for, and whom to trust there."""

    connect_to: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    ca: Path | None = None


class ChatSender:
    """Sends chat messages. One per service."""

    def __init__(
        self,
        guard: AddressGuard,
        *,
        timeout_s: float = TIMEOUT_S,
        place: ChatPlace | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._place = place or ChatPlace()
        self._command = command or python_command(_MODULE)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def send(self, target: ChatTarget, notice: Notice) -> Outcome:
        """One attempt. Raises RecordError: it holds no issue."""
        message = message_for(notice)
        url = target.url.get_secret_value()
        own = words_of(target.template, notice, "")
        task = Task(
            url=url,
            title="" if own else escaped(url, message.title),
            body=clip(own, _BODY) if own else escaped(url, body_of(message)),
            private=self._guard.private,
            allow=[str(network) for network in self._guard.allow],
            connect_to=self._place.connect_to,
        )
        async with self._room:
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await self._run(task)
            except TimeoutError:
                return Outcome(failure="timeout")
            except OSError as error:
                logger.warning(
                    "no process for a chat message",
                    extra={"action": "chat", "reason": type(error).__name__},
                )
                return Outcome(later="the process for chat messages could not be started")
        return (
            Outcome(later="the process for chat messages failed")
            if result is None
            else (outcome_of(result))
        )

    async def close(self) -> None:
        """Close the sender; it keeps nothing open."""

    async def _run(self, task: Task) -> Result | None:
        environ = {
            name: value
            for name, value in python_environment(os.environ).items()
            # A proxy would connect where the guard does not see.
            if not name.lower().endswith("_proxy")
        }
        if self._place.ca is not None:
            environ["REQUESTS_CA_BUNDLE"] = str(self._place.ca)
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # What apprise logs may quote an answer.
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            env=environ,
        )
        try:
            out, _ = await process.communicate(json.dumps(asdict(task)).encode())
        except BaseException:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
            raise
        if process.returncode != 0:
            return None
        try:
            return Result(**json.loads(out))
        except (ValueError, TypeError):
            return None


def outcome_of(result: Result) -> Outcome:
    """What the child's result means. Pure."""
    status = result.status
    good = status is not None and 200 <= status < 300
    if result.sent and not good:
        # Whatever else was asked on the way: it is there, and must not come twice.
        return Outcome(done="sent")
    if not result.sent:
        if result.refused is not None:
            return Outcome(forbidden=result.refused)
        if result.failure is not None:
            return Outcome(failure=result.failure)
    if status is not None and good == result.sent:
        return Outcome(status=status, phrase=phrase_of(status), retry_after=result.retry_after)
    if result.requests:
        return Outcome(later="the service did not take the message")
    return Outcome(forbidden="the chat URL cannot be used: a part of it is missing or wrong")


def body_of(message: Message) -> str:
    """The message in few lines: chat is read on telephones. Pure."""
    lines = [message.headline]
    lines += [f"{row.label}: {clip(row.value, 300)}" for row in message.rows if row.label in _ROWS]
    return clip("\n".join(lines), _BODY)


def escaped(url: str, text: str) -> str:
    """Text that calls nobody by name and hides no link behind words, in the service of a URL. Pure.

    apprise itself escapes for Slack, and nowhere else.
    """
    parts = urlsplit(url)
    service = parts.hostname if parts.scheme == "https" else parts.scheme
    if service in ("slack", "hooks.slack.com"):
        return text
    if service in ("discord", "discord.com", "discordapp.com"):
        text = _MARKDOWN.sub(r"\\\1", text)
    # A zero-width space is not seen, and ends what would be a name or a link.
    return text.replace("@", "@\u200b").replace("<", "<\u200b").replace("](", "]\u200b(")
