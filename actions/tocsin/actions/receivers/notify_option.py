"""What `--notify` may name: a webhook's URL, a mail address, a chat URL. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, unquote_plus, urlsplit

from pydantic import SecretStr

from tocsin.actions.delivery.routing import Kind
from tocsin.schemas.configuration.values import parse_http_url, parse_mail_address
from tocsin.schemas.errors import ConfigurationError

CHAT_SCHEMES: Final = (
    "discord",
    "gchat",
    "gotify",
    "gotifys",
    "matrix",
    "matrixs",
    "mmost",
    "mmosts",
    "msteams",
    "ntfy",
    "ntfys",
    "pover",
    "rocket",
    "rockets",
    "slack",
    "tgram",
    "workflows",
    "wxteams",
    "zulip",
)
"""The kinds of chat URLs that are allowed. Others that apprise knows run programs, write files or
talk to what is on this machine."""

CHAT_HOSTS: Final = (
    "chat.googleapis.com",
    "discord.com",
    "discordapp.com",
    "hooks.slack.com",
)
"""Hosts whose `https://` webhook URLs are for chat messages: no other form is accepted there."""


_REFUSED_OPTIONS: Final = frozenset(
    {"batch", "cto", "overflow", "redirect", "retry", "rto", "store", "template", "verify", "wait"}
)
"""What a chat URL may not ask for: files, redirects, unchecked certificates, a schedule."""

_MOST_PARTS: Final = {
    "matrix": 2, "matrixs": 2, "ntfy": 2, "ntfys": 2, "rocket": 3, "rockets": 3, "slack": 4,
    "tgram": 2, "wxteams": 2, "zulip": 3,
}  # fmt: skip
"""Parts of a URL between slashes, host and one target included; the child counts more exactly."""

SEVERAL_TARGETS: Final = "the chat URL names several targets: give each a receiver of its own"


@dataclass(frozen=True, slots=True)
class Notified:
    """One address. `name` is what the ledger calls it; the same address has the same name."""

    kind: Kind
    name: str
    url: SecretStr
    to: tuple[str, ...] = ()


def parse_notify(text: str) -> Notified:
    """Read one `--notify`.

    Raises:
        ConfigurationError: it is none of those kinds. The message shows its scheme at most: such
            URLs often are secret.
    """
    scheme = text.partition(":")[0].lower()
    if scheme == "mailto" or ("@" in text and "://" not in text):
        return _mail(text)
    if _is_chat(text):
        why_not = chat_fault(text)
        if why_not is not None:
            raise ConfigurationError(f"--notify: {why_not}")
        # What stands for the host is a token in most of them, but for https.
        service = urlsplit(text).hostname if scheme == "https" else scheme
        return Notified("chat", f"notify:{service}-{_hash(text)}", SecretStr(text))
    if scheme in ("http", "https"):
        try:
            parse_http_url(text)
        except ValueError as error:
            raise ConfigurationError(f"--notify: {error}") from None
        host = urlsplit(text).hostname or ""
        return Notified("webhook", f"notify:{host[:60]}-{_hash(text)}", SecretStr(text))
    raise ConfigurationError(
        "--notify: expected a webhook like https://hooks.example.com/ml, a mail address like "
        "mailto:me@example.com, or a chat URL like slack://…, discord://… or tgram://…"
        + (f"; {scheme}:// is none of those" if "://" in text and scheme.isalnum() else "")
    )


def notify_names(notify: Sequence[str]) -> list[str]:
    """What the receivers of `--notify` are called in the ledger.

    The same address has the same name in the next process, in whichever order it is given; no name
    of a file has a colon.
    """
    return list(dict.fromkeys(parse_notify(text).name for text in notify))


def chat_fault(text: str) -> str | None:
    """Why a URL is none that a chat message can be sent to; None if it is. It is not repeated."""
    if not _is_chat(text):
        return (
            "expected a chat URL like slack://TOKEN_A/TOKEN_B/TOKEN_C, discord://ID/TOKEN or "
            "tgram://BOT_TOKEN/CHAT_ID"
        )
    scheme, _, rest = text.partition("://")
    path, _, query = rest.partition("?")
    # apprise splits options at ; as well, and takes what follows a # for options, too.
    options: dict[str, str] = {}
    for part in re.split("[&;?#]", query):
        key, _, value = part.partition("=")
        options[unquote_plus(key).strip().lstrip("+-:").lower()] = unquote_plus(value)
    refused = sorted(_REFUSED_OPTIONS & set(options))
    if refused:
        return f"the option {refused[0]!r} is not allowed in a chat URL"
    # One that took the message would get it again for as long as another does not.
    parts = len([part for part in path.split("/") if part])
    named = len([one for one in re.split(r"[\s,;]+", options.get("to", "")) if one])
    if named > 1 or parts + named > _MOST_PARTS.get(scheme.lower(), parts + 1):
        return SEVERAL_TARGETS
    return None


def _is_chat(text: str) -> bool:
    """Whether a URL is for a chat service, usable or not."""
    scheme, separator, rest = text.partition("://")
    if not separator or not rest or not text.isprintable():
        return False
    if scheme.lower() != "https":
        return scheme.lower() in CHAT_SCHEMES
    try:
        return urlsplit(text).hostname in CHAT_HOSTS
    except ValueError:
        return False


def _mail(text: str) -> Notified:
    path, _, _ = text.removeprefix("mailto:").partition("?")
    try:
        to = tuple(parse_mail_address(unquote(one.strip())) for one in path.split(","))
    except ValueError as error:
        raise ConfigurationError(f"--notify: {error}") from None
    name = f"notify:{to[0][:60]}-{_hash(','.join(to))}"
    return Notified("email", name, SecretStr("mailto:" + ",".join(to)), to)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
