"""The part of the configuration that is ours: receivers, and the rules' action lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tocsin.actions.delivery.routing import Kind, Routing
from tocsin.actions.receivers.notify_option import chat_fault, notify_names, parse_notify
from tocsin.actions.receivers.run_addresses import RunAddresses
from tocsin.schemas.configuration.file import Config, read_config
from tocsin.schemas.configuration.problems import Finding, Loc, quoted
from tocsin.schemas.configuration.receivers import (
    ChatReceiver,
    EmailReceiver,
    SmsReceiver,
    WebhookReceiver,
)
from tocsin.schemas.configuration.yaml import load
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import Issue

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS: Final = frozenset(
    {"content-type", "content-length", "host", "transfer-encoding", "connection", "user-agent"}
)


def check_receivers(config: Config) -> Iterator[Finding]:
    """What is wrong with receivers and action lists beyond their shape; for the registry."""
    for name, receiver in config.receivers.items():
        loc: Loc = ("receivers", name)
        if isinstance(receiver, WebhookReceiver):
            yield from _check_headers(receiver, (*loc, "headers"))
        elif isinstance(receiver, ChatReceiver):
            if isinstance(receiver.url, str) and (why_not := chat_fault(receiver.url)) is not None:
                hint = None
                if why_not.startswith("expected"):
                    why_not += ", or {secret: NAME}"
                    hint = "type: webhook for your own endpoint"
                yield Finding((*loc, "url"), why_not, hint=hint, hide_value=True)
        elif isinstance(receiver, EmailReceiver | SmsReceiver):
            for index, one in enumerate(receiver.to):
                if one in receiver.to[:index]:
                    message = "this one is in the list already"
                    yield Finding((*loc, "to", index), message, "duplicate_recipient", "remove it")
    for rule in config.rules:
        listed: set[str] = set()
        for action in rule.actions or ():
            what = action.receiver or action.kind
            if what in listed:
                message = f"{quoted(what)} is in this list already"
                yield Finding(action.loc, message, "duplicate_action", "remove it")
            listed.add(what)


def _check_headers(receiver: WebhookReceiver, loc: Loc) -> Iterator[Finding]:
    seen: set[str] = set()
    for header in receiver.headers:
        here = (*loc, header)
        low = header.lower()
        if not _HEADER.fullmatch(header):
            yield Finding(here, "expected the name of an HTTP header", "header", at="key")
        elif low in _OURS or low.startswith("webhook-"):
            yield Finding(here, f"the header {low!r} is set by tocsin", "header", at="key")
        elif low in seen:
            yield Finding(here, f"the header {low!r} is there already", "header", at="key")
        seen.add(low)


def routing_of(
    config: Config,
    *,
    path: Path | None = None,
    notify: Sequence[str] = (),
    addresses: RunAddresses | None = None,
    stops_off: str | None = None,
) -> Routing:
    """The decisions of a configuration. Reads its file once more, for the places: may block."""
    kinds: dict[str, Kind] = {name: item.type for name, item in config.receivers.items()}
    kinds |= {address.name: address.kind for address in map(parse_notify, notify)}

    def of_its_run(issue: Issue) -> list[tuple[str, Kind]]:
        found = [] if addresses is None else addresses.of(issue.incarnation)
        return [(address.name, address.kind) for address in found]

    return Routing(
        {rule.name: rule for rule in config.rules},
        notify_names(notify),
        stops_off,
        places(path),
        kinds,
        [name for name, item in config.receivers.items() if not item.send_resolved],
        of_its_run,
    )


def places(path: Path | None) -> Callable[[Loc], str]:
    """Says `tocsin.yaml:14:3` for a part of a file; without the file, the way to it."""
    try:
        document = None if path is None else load(read_config(path), source=path.name)
    except ConfigurationError:
        document = None

    def place(loc: Loc) -> str:
        if document is None:
            return "config: " + ".".join(map(str, loc))
        line, column = document.position(loc)
        return f"{document.source}:{line}:{column}"

    return place
