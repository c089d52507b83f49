"""Chat: one attempt is one message through apprise, in a child process that is guarded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tocsin.actions.decision.retry import RETRIED_STATUSES, Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess
from tocsin.actions.receivers.chat.editable import Ask, EditableChat
from tocsin.actions.receivers.http import HttpPoster
from tocsin.actions.receivers.message import ALSO, Message, message_for
from tocsin.actions.receivers.templates.template import Template, words_of
from tocsin.schemas.records.deliveries import STOPPED
from tocsin.schemas.records.events import clip

_BODY: Final = 1_500
_OTHERS: Final = 5
_ROWS: Final = frozenset(
    {"Where first", "Since", "Over since", "Seen again", "How bad", "At stake", "Saved",
     "What followed", "Caused by", "Good checkpoint", "What tocsin did", "What to try", "Labels",
     "Issue", "To answer", "Why sent"}
)  # fmt: skip
_MARKDOWN: Final = re.compile(r"([\\*_~`|#>\[\]()])")


@dataclass(frozen=True, slots=True)
class ChatTarget:
    """A receiver. The URL is secret: most hold a token.

    Attributes:
        editable: where its messages can be edited; None: apprise sends them.
    """

    name: str
    url: SecretStr
    template: Template | None = None
    editable: EditableChat | None = None


class ChatSender:
    """Sends chat messages. One per service; `close` it at the end."""

    def __init__(self, process: AppriseProcess, poster: HttpPoster) -> None:
        self._process = process
        self._poster = poster

    async def send(self, target: ChatTarget, notice: Notice) -> Outcome:
        """One attempt. Raises RecordError: it holds no issue."""
        message = message_for(notice)
        url = target.url.get_secret_value()
        own = words_of(target.template, notice, "")
        title, body = escaped(url, message.title), escaped(url, body_of(message))
        answer = f"\nAnswer: {message.answer_url}" if message.answer_url else ""
        if target.editable is not None:
            longest = target.editable.longest
            text = own or clip(f"{title}\n{body}", longest - len(answer)) + answer
            return await self._keep_one(target.editable, notice, message, clip(text, longest), url)
        if own:
            return await self._process.deliver(url, "", clip(own, _BODY))
        return await self._process.deliver(url, title, body + answer)

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()

    async def _keep_one(
        self, chat: EditableChat, notice: Notice, message: Message, text: str, url: str
    ) -> Outcome:
        """Post the message about an issue, or edit it and tell those who have seen it.

        An edit that is made twice changes nothing, so it comes first: an attempt after one that
        failed half-way notifies people once. How a stop has ended is edited in, and no more: that
        is no reason to call people, nor to post anew what somebody has removed.
        """
        quiet = notice.delivery.occasion == STOPPED
        if (handle := notice.handle) is not None:
            edited = await self._ask(chat, chat.edit(handle, text))
            if _later(edited) or (quiet and not _good(edited)):
                return edited
            if quiet:
                return replace(edited, handle=handle)
            if _good(edited):
                title = escaped(url, message.title)
                announced = await self._announce_change(chat, handle, message, text, title)
                return replace(edited if announced is None else announced, handle=handle)
            # It is gone, or may not be edited any more.
        posted = await self._ask(chat, chat.post(text))
        if _good(posted) and posted.handle is not None and chat.threads and not message.digest:
            # It is there; what is missing in its thread must not bring it a second time.
            evidence = clip(escaped(url, message.text()), chat.longest)
            await self._ask(chat, chat.post(evidence, to=posted.handle, loud=False))
        return posted

    async def _announce_change(
        self, chat: EditableChat, handle: str, message: Message, text: str, title: str
    ) -> Outcome | None:
        """An edit notifies nobody, so changes are also sent as a message; None: nothing changed."""
        worse = message.state != "resolved"
        if chat.answers:
            return await self._ask(chat, chat.post(text, to=handle, loud=worse))
        return await self._ask(chat, chat.post(title)) if worse else None

    async def _ask(self, chat: EditableChat, ask: Ask) -> Outcome:
        outcome, answer = await self._poster.ask(ask.method, ask.url, ask.body, ask.token)
        if not _good(outcome):
            return Outcome(status=200) if chat.unchanged(answer) else outcome
        return chat.refused(answer) or replace(outcome, handle=chat.handle(answer))


def _good(outcome: Outcome) -> bool:
    return outcome.status is not None and 200 <= outcome.status < 300


def _later(outcome: Outcome) -> bool:
    """Whether an attempt may succeed later; where it can never, another way is tried."""
    status = outcome.status or 0
    again = status >= 500 or status in RETRIED_STATUSES
    return outcome.failure is not None or outcome.later is not None or again


def body_of(message: Message) -> str:
    """The message in few lines: chat is read on telephones. Pure."""
    lines = [message.headline]
    others = [row for row in message.rows if row.label.startswith(ALSO)]
    lines += [f"{row.label}: {clip(row.value, 150)}" for row in others[:_OTHERS]]
    if len(others) > _OTHERS:
        lines.append(f"and {len(others) - _OTHERS} more: tocsin issues")
    shown = [row for row in message.rows if row.label in _ROWS or message.digest]
    lines += [f"{row.label}: {clip(row.value, 300)}" for row in shown]
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
