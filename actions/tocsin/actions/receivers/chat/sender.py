"""Chat: one attempt is one message through apprise, in a child process that is guarded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.retry import Outcome
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess
from tocsin.actions.receivers.message import Message, message_for
from tocsin.actions.receivers.templates.template import Template, words_of
from tocsin.schemas.records.events import clip

_BODY: Final = 1_500
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


class ChatSender:
    """Sends chat messages. One per service."""

    def __init__(self, process: AppriseProcess) -> None:
        self._process = process

    async def send(self, target: ChatTarget, notice: Notice) -> Outcome:
        """One attempt. Raises RecordError: it holds no issue."""
        message = message_for(notice)
        url = target.url.get_secret_value()
        own = words_of(target.template, notice, "")
        if own:
            return await self._process.deliver(url, "", clip(own, _BODY))
        title, body = escaped(url, message.title), escaped(url, body_of(message))
        return await self._process.deliver(url, title, body)

    async def close(self) -> None:
        """Close the sender; it keeps nothing open."""


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
