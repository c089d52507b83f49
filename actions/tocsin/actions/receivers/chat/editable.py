"""Chat services that give a message an id, by which it can be edited and answered. Pure.

apprise only sends. Here is what Slack and Mattermost (a bot's token), Discord (a webhook) and
Telegram (a bot) are asked by their own APIs, so that an issue is one message, which shows its
newest state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import unquote

from pydantic import JsonValue, SecretStr

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.http import Method

SLACK: Final = "https://slack.com"
DISCORD: Final = "https://discord.com"
TELEGRAM: Final = "https://api.telegram.org"

_SLACK_URL: Final = re.compile(r"slack://(xox[bp]-[A-Za-z0-9-]+)/((?:#|%23)?[A-Za-z0-9_-]+)/?")
_DISCORD_URL: Final = re.compile(
    r"(?:discord://|https://discord(?:app)?\.com/api/webhooks/)([0-9]+)/([A-Za-z0-9_-]+)/?"
)
_TELEGRAM_URL: Final = re.compile(r"tgram://([0-9]+:[A-Za-z0-9_-]+)/(-?[0-9]+)/?")
_MATTERMOST_URL: Final = re.compile(
    r"mmost(s?)://([A-Za-z0-9.-]+(?::[0-9]+)?)/([a-z0-9]{26})\?mode=bot&to=([a-z0-9]{26})"
)
_MATTERMOST_POST: Final = re.compile(r"[a-z0-9]{26}")
_SLACK_MESSAGE: Final = re.compile(r"([A-Z0-9]{2,30})/([0-9]{1,20}\.[0-9]{1,10})")

_SLACK_LATER: Final = frozenset(
    {"fatal_error", "internal_error", "ratelimited", "request_timeout", "service_unavailable"}
)
_SLACK_NEVER: Final = frozenset(
    {"account_inactive", "channel_not_found", "invalid_auth", "is_archived", "missing_scope",
     "msg_too_long", "no_permission", "not_authed", "not_in_channel", "restricted_action",
     "token_expired", "token_revoked"}
)  # fmt: skip
"""Slack's words for errors that we repeat; any other is not."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. The URL may hold a token."""

    method: Method
    url: SecretStr
    body: dict[str, JsonValue]
    token: SecretStr | None = None


class EditableChat(Protocol):
    """A channel, room or person of such a service.

    Attributes:
        longest: characters of a message.
        threads: whether answers are shown in a thread beside the message.
        answers: whether a message can answer another one.
    """

    @property
    def longest(self) -> int: ...
    @property
    def threads(self) -> bool: ...
    @property
    def answers(self) -> bool: ...

    def post(self, text: str, *, to: str | None = None, loud: bool = True) -> Ask:
        """A new message; to a handle: an answer to that message, seen by all if `loud`."""
        ...

    def edit(self, handle: str, text: str) -> Ask:
        """Another text for a message."""
        ...

    def handle(self, answer: JsonValue) -> str | None:
        """What a message is called there, from the answer to `post`; None if it is not said."""
        ...

    def refused(self, answer: JsonValue) -> Outcome | None:
        """Why an answer with a good status is none; None if it is one."""
        ...

    def unchanged(self, answer: JsonValue) -> bool:
        """Whether an edit was refused because the message has this text already."""
        ...


@dataclass(frozen=True, slots=True)
class Slack:
    """A channel of Slack. https://docs.slack.dev/reference/methods/chat.postMessage"""

    token: SecretStr
    channel: str
    base: str = SLACK
    longest: int = 3_500
    threads: bool = True
    answers: bool = True

    def post(self, text: str, *, to: str | None = None, loud: bool = True) -> Ask:
        """A new message; to a handle: an answer to that message, seen by all if `loud`."""
        body: dict[str, JsonValue] = {"channel": self.channel, **_slack_text(text)}
        if to is not None:
            channel, _, message = to.partition("/")
            body |= {"channel": channel, "thread_ts": message, "reply_broadcast": loud}
        return self._ask("chat.postMessage", body)

    def edit(self, handle: str, text: str) -> Ask:
        """Another text for a message."""
        channel, _, message = handle.partition("/")
        return self._ask("chat.update", {"channel": channel, "ts": message, **_slack_text(text)})

    def handle(self, answer: JsonValue) -> str | None:
        """What a message is called there, from the answer to `post`; None if it is not said."""
        if not isinstance(answer, dict):
            return None
        found = f"{answer.get('channel')}/{answer.get('ts')}"
        return found if _SLACK_MESSAGE.fullmatch(found) else None

    def refused(self, answer: JsonValue) -> Outcome | None:
        """Slack answers 200 to what it refuses."""
        if not isinstance(answer, dict) or "ok" not in answer:
            return Outcome(later="Slack: no answer that it took the message")
        if answer["ok"] is True:
            return None
        error = str(answer.get("error"))
        if error in _SLACK_LATER:
            return Outcome(later=f"Slack: {error}")
        return Outcome(forbidden=f"Slack: {error}" if error in _SLACK_NEVER else "Slack refused it")

    def unchanged(self, answer: JsonValue) -> bool:
        """Whether an edit was refused because the message has this text already. It takes such an
        edit."""
        return False

    def _ask(self, method: str, body: dict[str, JsonValue]) -> Ask:
        return Ask("POST", SecretStr(f"{self.base}/api/{method}"), body, self.token)


@dataclass(frozen=True, slots=True)
class Discord:
    """A webhook of Discord. https://docs.discord.com/developers/resources/webhook"""

    webhook: SecretStr
    base: str = DISCORD
    longest: int = 2_000
    threads: bool = False
    answers: bool = False

    def post(self, text: str, *, to: str | None = None, loud: bool = True) -> Ask:
        """A new message; to a handle: an answer to that message, seen by all if `loud`."""
        return Ask("POST", self._url("?wait=true"), _discord_text(text))

    def edit(self, handle: str, text: str) -> Ask:
        """Another text for a message."""
        return Ask("PATCH", self._url(f"/messages/{handle}"), _discord_text(text))

    def handle(self, answer: JsonValue) -> str | None:
        """What a message is called there, from the answer to `post`; None if it is not said."""
        return _number(answer.get("id")) if isinstance(answer, dict) else None

    def refused(self, answer: JsonValue) -> Outcome | None:
        """Why an answer with a good status is none; None if it is one. The status says it."""
        return None

    def unchanged(self, answer: JsonValue) -> bool:
        """Whether an edit was refused because the message has this text already. It takes such an
        edit."""
        return False

    def _url(self, path: str) -> SecretStr:
        return SecretStr(f"{self.base}/api/webhooks/{self.webhook.get_secret_value()}{path}")


@dataclass(frozen=True, slots=True)
class Telegram:
    """A chat of a bot of Telegram. https://core.telegram.org/bots/api"""

    token: SecretStr
    chat: str
    base: str = TELEGRAM
    longest: int = 4_000
    threads: bool = False
    answers: bool = True

    def post(self, text: str, *, to: str | None = None, loud: bool = True) -> Ask:
        """A new message; to a handle: an answer to that message, seen by all if `loud`."""
        answered: dict[str, JsonValue] = {}
        if to is not None:
            # The first message may have been deleted.
            parameters: dict[str, JsonValue] = {
                "message_id": int(to),
                "allow_sending_without_reply": True,
            }
            answered = {"reply_parameters": parameters, "disable_notification": not loud}
        return self._ask("sendMessage", {**self._text(text), **answered})

    def edit(self, handle: str, text: str) -> Ask:
        """Another text for a message."""
        return self._ask("editMessageText", {**self._text(text), "message_id": int(handle)})

    def handle(self, answer: JsonValue) -> str | None:
        """What a message is called there, from the answer to `post`; None if it is not said."""
        result = answer.get("result") if isinstance(answer, dict) else None
        return _number(result.get("message_id")) if isinstance(result, dict) else None

    def refused(self, answer: JsonValue) -> Outcome | None:
        """Why an answer with a good status is none; None if it is one. The status says it."""
        return None

    def unchanged(self, answer: JsonValue) -> bool:
        """Whether an edit was refused because the message has this text already. An attempt after
        one that failed half-way makes such an edit."""
        description = answer.get("description") if isinstance(answer, dict) else None
        return isinstance(description, str) and "message is not modified" in description

    def _text(self, text: str) -> dict[str, JsonValue]:
        return {"chat_id": self.chat, "text": text, "link_preview_options": {"is_disabled": True}}

    def _ask(self, method: str, body: dict[str, JsonValue]) -> Ask:
        url = f"{self.base}/bot{self.token.get_secret_value()}/{method}"
        return Ask("POST", SecretStr(url), body)


@dataclass(frozen=True, slots=True)
class Mattermost:
    """A channel of Mattermost. https://developers.mattermost.com/api-documentation/"""

    token: SecretStr
    channel: str
    base: str
    longest: int = 4_000
    threads: bool = True
    answers: bool = True

    def post(self, text: str, *, to: str | None = None, loud: bool = True) -> Ask:
        """A new message; to a handle: an answer to that message, seen by all if `loud`."""
        body: dict[str, JsonValue] = {"channel_id": self.channel, "message": text}
        url = SecretStr(f"{self.base}/api/v4/posts")
        return Ask("POST", url, body | ({} if to is None else {"root_id": to}), self.token)

    def edit(self, handle: str, text: str) -> Ask:
        """Another text for a message."""
        url = SecretStr(f"{self.base}/api/v4/posts/{handle}/patch")
        return Ask("PUT", url, {"message": text}, self.token)

    def handle(self, answer: JsonValue) -> str | None:
        """What a message is called there, from the answer to `post`; None if it is not said."""
        found = str(answer.get("id")) if isinstance(answer, dict) else ""
        return found if _MATTERMOST_POST.fullmatch(found) else None

    def refused(self, answer: JsonValue) -> Outcome | None:
        """Why an answer with a good status is none; None if it is one. The status says it."""
        return None

    def unchanged(self, answer: JsonValue) -> bool:
        """Whether an edit was refused because the message has this text already. It takes such an
        edit."""
        return False


def editable_chat(url: SecretStr) -> EditableChat | None:
    """The chat that a URL of apprise names, if its messages can be edited; options prevent it."""
    text = url.get_secret_value()
    if found := _SLACK_URL.fullmatch(text):
        return Slack(SecretStr(found[1]), unquote(found[2]))
    if found := _DISCORD_URL.fullmatch(text):
        return Discord(SecretStr(f"{found[1]}/{found[2]}"))
    if found := _TELEGRAM_URL.fullmatch(text):
        return Telegram(SecretStr(found[1]), found[2])
    if found := _MATTERMOST_URL.fullmatch(text):
        return Mattermost(SecretStr(found[3]), found[4], f"http{found[1]}://{found[2]}")
    return None


def _slack_text(text: str) -> dict[str, JsonValue]:
    """Text in which Slack finds no mention and no link of its own form."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    quiet: dict[str, JsonValue] = {"unfurl_links": False, "unfurl_media": False}
    return {"text": safe, "mrkdwn": False, "parse": "none", "link_names": False, **quiet}


def _discord_text(text: str) -> dict[str, JsonValue]:
    """Text that calls nobody, and shows no pages that it links to."""
    return {"content": text, "allowed_mentions": {"parse": []}, "flags": 4}


def _number(value: JsonValue) -> str | None:
    text = str(value)
    return text if text.isascii() and text.isdigit() and len(text) <= 20 else None
