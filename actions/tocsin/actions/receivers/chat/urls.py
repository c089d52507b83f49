"""Which chat URLs are allowed. Pure."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_plus, urlsplit

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

_MAX_PARTS: Final = {
    "matrix": 2, "matrixs": 2, "ntfy": 2, "ntfys": 2, "rocket": 3, "rockets": 3, "slack": 4,
    "tgram": 2, "wxteams": 2, "zulip": 3,
}  # fmt: skip
"""Parts of a URL between slashes, host and one target included; the child counts more exactly."""

SEVERAL_TARGETS: Final = "the chat URL names several targets: create a receiver for each"


def chat_fault(text: str) -> str | None:
    """Why a URL is none that a chat message can be sent to; None if it is. It is not repeated."""
    if not is_chat(text):
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
    if named > 1 or parts + named > _MAX_PARTS.get(scheme.lower(), parts + 1):
        return SEVERAL_TARGETS
    return None


def is_chat(text: str) -> bool:
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
