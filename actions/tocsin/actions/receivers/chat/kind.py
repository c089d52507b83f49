"""Chat receivers, with their URLs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

from tocsin.actions.receivers.chat.apprise_process import AT_ONCE, AppriseProcess
from tocsin.actions.receivers.chat.config import ChatReceiver
from tocsin.actions.receivers.chat.editable import editable_chat
from tocsin.actions.receivers.chat.sender import ChatSender, ChatTarget, escaped
from tocsin.actions.receivers.chat.urls import chat_fault, is_chat
from tocsin.actions.receivers.http import HttpPoster
from tocsin.actions.receivers.kind import Address, ReceiverContext, ReceiverKind
from tocsin.actions.receivers.templates.template import (
    names_actions,
    template_findings,
    usable_template,
)
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import ConfigurationError


class Chat(ReceiverKind[ChatReceiver, ChatTarget]):
    """Sends each issue as a chat message."""

    config = ChatReceiver
    libraries = ("apprise", "aiohttp")
    called = "a receiver of chat messages"
    at_once = AT_ONCE

    def check(self, config: ChatReceiver, loc: Loc) -> Iterator[Problem]:
        """A URL that no chat message can be sent to; a wrong template."""
        yield from template_findings(config.template, str, loc)
        if isinstance(config.url, str) and (why_not := chat_fault(config.url)) is not None:
            hint = None
            if why_not.startswith("expected"):
                why_not += ", or {secret: NAME}"
                hint = "type: webhook for your own endpoint"
            yield Problem((*loc, "url"), why_not, hint=hint, hide_value=True)

    def address(self, text: str) -> Address | None:
        """A URL of apprise, or the webhook URL that a chat service gives."""
        if not is_chat(text):
            return None
        if (why_not := chat_fault(text)) is not None:
            raise ValueError(why_not)
        # What stands for the host is a token in most of them, but for https.
        scheme = text.partition(":")[0].lower()
        service = urlsplit(text).hostname if scheme == "https" else scheme
        return Address.from_text(str(service), text, ChatReceiver(type="chat", url=text))

    def target(
        self, name: str, config: ChatReceiver, context: ReceiverContext
    ) -> ChatTarget | None:
        """The address of the chat; None without its URL."""
        url = value_of(config.url, context.secrets)
        if url is None:
            return None
        if (why_not := chat_fault(url.get_secret_value())) is not None:
            raise ConfigurationError(f"receiver {name!r}: {why_not}")
        escape = partial(escaped, url.get_secret_value())
        template = usable_template(config.template, escape, name)
        return ChatTarget(name, url, template, editable_chat(url))

    def load(self) -> None:
        """aiohttp alone: apprise runs in its own process."""
        importlib.import_module("aiohttp")

    def groups(self, target: ChatTarget | None) -> bool:
        """Whether its messages stay as they are: one that is edited is about one issue."""
        return target is None or target.editable is None

    def edits(self, target: ChatTarget | None) -> bool:
        """Whether a sender edits the message about an issue there, without notifying anybody."""
        return target is not None and target.editable is not None

    def digests(self, config: ChatReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def shows_question(self, config: ChatReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. A text of the
        user's own may leave it out."""
        return config.template is None or names_actions(config.template)

    def sender(self, context: ReceiverContext) -> ChatSender:
        """One for all chat receivers."""
        poster = HttpPoster(context.guard, software=context.software)
        return ChatSender(AppriseProcess(context.guard), poster)
