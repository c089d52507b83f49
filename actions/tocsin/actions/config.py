"""The part of the configuration that is ours: receivers, and the rules' action lists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tocsin.actions.routing import Routing
from tocsin.actions.signature import webhook_key
from tocsin.actions.webhook import WebhookTarget
from tocsin.schemas.config import Config
from tocsin.schemas.config_problems import Finding, Loc
from tocsin.schemas.config_sections import WebhookReceiver
from tocsin.schemas.config_values import SecretRef, parse_http_url
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.yaml_loader import load

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS: Final = frozenset(
    {"content-type", "content-length", "host", "transfer-encoding", "connection", "user-agent"}
)


def check_receivers(config: Config) -> Iterator[Finding]:
    """What is wrong with receivers and action lists beyond their shape; for the registry."""
    for name, receiver in config.receivers.items():
        seen: set[str] = set()
        for header in receiver.headers:
            loc: Loc = ("receivers", name, "headers", header)
            low = header.lower()
            if not _HEADER.fullmatch(header):
                yield Finding(loc, "expected the name of an HTTP header", "header", at="key")
            elif low in _OURS or low.startswith("webhook-"):
                yield Finding(loc, f"the header {low!r} is set by tocsin", "header", at="key")
            elif low in seen:
                yield Finding(loc, f"the header {low!r} is there already", "header", at="key")
            seen.add(low)
    for rule in config.rules:
        listed: set[str] = set()
        for action in rule.actions or ():
            what = action.receiver or action.kind
            if what in listed:
                message = f"{what!r} is in this list already"
                yield Finding(action.loc, message, "duplicate_action", "remove it")
            listed.add(what)


def webhook_targets(
    config: Config, secrets: Mapping[str, SecretStr], notify: Sequence[str] = ()
) -> dict[str, WebhookTarget]:
    """The receivers by name, those of `--notify` among them by `notify_names`.

    Raises:
        ConfigurationError: a URL or key cannot be used. The message shows no secret.
    """
    targets: dict[str, WebhookTarget] = {}
    for name, receiver in config.receivers.items():
        if (target := _target(name, receiver, secrets)) is not None:
            targets[name] = target
    for url in notify:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"--notify {url!r}: expected a URL like https://hooks.example.com/ml; "
                "addresses for mail and chat are not supported yet"
            )
        name = notify_names([url])[0]
        targets[name] = WebhookTarget(name, _url(SecretStr(url), "--notify"))
    return targets


def notify_names(notify: Sequence[str]) -> list[str]:
    """What the receivers of `--notify` are called in the ledger: the host, and a hash of the URL.

    The same URL has the same name in the next process, in whichever order it is given; no name of
    a file has a colon.
    """
    names: list[str] = []
    for url in notify:
        host = urlsplit(url).hostname or ""
        names.append(f"notify:{host[:60]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}")
    return list(dict.fromkeys(names))


def routing_of(
    config: Config,
    *,
    path: Path | None = None,
    notify: Sequence[str] = (),
    stops_off: str | None = None,
) -> Routing:
    """The decisions of a configuration. Reads its file once more, for the places: may block."""
    rules = {rule.name: rule for rule in config.rules}
    return Routing(rules, notify_names(notify), stops_off, places(path))


def places(path: Path | None) -> Callable[[Loc], str]:
    """Says `tocsin.yaml:14:3` for a part of a file; without the file, the way to it."""
    try:
        document = None if path is None else load(path.read_text(), source=path.name)
    except (OSError, UnicodeDecodeError):
        document = None

    def place(loc: Loc) -> str:
        if document is None:
            return "config: " + ".".join(map(str, loc))
        line, column = document.position(loc)
        return f"{document.source}:{line}:{column}"

    return place


def _target(
    name: str, receiver: WebhookReceiver, secrets: Mapping[str, SecretStr]
) -> WebhookTarget | None:
    """None if its URL is an optional secret that is missing: then the receiver is not there."""
    what = f"receiver {name!r}"
    url = _value(receiver.url, secrets)
    if url is None:
        return None
    keys: list[SecretStr] = []
    if receiver.sign is not None:
        for reference in (receiver.sign.key, receiver.sign.previous_key):
            if reference is not None and (key := _value(reference, secrets)) is not None:
                keys.append(webhook_key(key, what))
        if not keys:
            raise ConfigurationError(f"{what}: it is to be signed, but there is no key")
    headers: dict[str, SecretStr] = {}
    for header, text in receiver.headers.items():
        if (value := _value(text, secrets)) is not None:
            if not value.get_secret_value().isprintable():
                raise ConfigurationError(
                    f"{what}: the header {header!r} has a line break or control character"
                )
            headers[header] = value
    give_up_ms = receiver.retry.give_up_after // timedelta(milliseconds=1)
    return WebhookTarget(name, _url(url, what), headers, tuple(keys), give_up_ms)


def _value(text: str | SecretRef, secrets: Mapping[str, SecretStr]) -> SecretStr | None:
    return SecretStr(text) if isinstance(text, str) else secrets.get(text.name)


def _url(url: SecretStr, what: str) -> SecretStr:
    try:
        parse_http_url(url.get_secret_value())
    except ValueError as error:
        raise ConfigurationError(f"{what}: {error}") from None
    return url
