"""Webhooks, with their secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tocsin.actions.receivers.http import HttpPoster, http_url, tls_context
from tocsin.actions.receivers.kind import Address, ReceiverContext, ReceiverKind
from tocsin.actions.receivers.templates.template import (
    escape_for,
    is_json,
    template_findings,
    usable_template,
)
from tocsin.actions.receivers.webhook.bodies import (
    BodyOf,
    alertmanager_v4,
    binary,
    structured,
    templated,
)
from tocsin.actions.receivers.webhook.config import BodyName, WebhookReceiver
from tocsin.actions.receivers.webhook.sender import WebhookSender, WebhookTarget
from tocsin.actions.receivers.webhook.signature import webhook_key
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.configuration.values import parse_http_url
from tocsin.schemas.errors import ConfigurationError

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS: Final = frozenset(
    {"content-type", "content-length", "host", "transfer-encoding", "connection", "user-agent"}
)


class Webhook(ReceiverKind[WebhookReceiver, WebhookTarget]):
    """Posts each issue to a URL."""

    config = WebhookReceiver
    libraries = ("aiohttp",)
    called = "a webhook receiver"

    def check(self, config: WebhookReceiver, loc: Loc) -> Iterator[Problem]:
        """Headers that are none, ours, or there twice; TLS files without TLS; a wrong template."""
        plain = isinstance(config.url, str) and urlsplit(config.url).scheme != "https"
        if config.tls is not None and plain:
            yield Problem((*loc, "tls"), "expected an https:// URL with it", at="key")
        kind = "" if config.template is None else config.template.content_type
        json_body = is_json(kind)
        yield from template_findings(config.template, escape_for(kind), loc, json_body=json_body)
        seen: set[str] = set()
        for header in config.headers:
            here = (*loc, "headers", header)
            low = header.lower()
            if not _HEADER.fullmatch(header):
                yield Problem(here, "expected the name of an HTTP header", "header", at="key")
            elif low in _OURS or low.startswith(("webhook-", "ce-")):
                yield Problem(here, f"the header {low!r} is set by tocsin", "header", at="key")
            elif low in seen:
                yield Problem(here, f"the header {low!r} is there already", "header", at="key")
            seen.add(low)

    def address(self, text: str) -> Address | None:
        """An http(s) URL."""
        if text.partition(":")[0].lower() not in ("http", "https"):
            return None
        parse_http_url(text)
        host = urlsplit(text).hostname or ""
        return Address.from_text(host[:60], text, WebhookReceiver(type="webhook", url=text))

    def target(
        self, name: str, config: WebhookReceiver, context: ReceiverContext
    ) -> WebhookTarget | None:
        """The address of the webhook; None without its URL."""
        what = f"receiver {name!r}"
        url = value_of(config.url, context.secrets)
        if url is None:
            return None
        keys: list[SecretStr] = []
        if config.sign is not None:
            for reference in (config.sign.key, config.sign.previous_key):
                key = value_of(reference, context.secrets)
                if key is not None:
                    keys.append(webhook_key(key, what))
            if not keys:
                raise ConfigurationError(f"{what}: it is to be signed, but there is no key")
        headers: dict[str, SecretStr] = {}
        for header, text in config.headers.items():
            if (value := value_of(text, context.secrets)) is not None:
                if not value.get_secret_value().isprintable():
                    raise ConfigurationError(
                        f"{what}: the header {header!r} has a line break or control character"
                    )
                headers[header] = value
        return WebhookTarget(
            name,
            http_url(url, name),
            headers,
            tuple(keys),
            body=_body_of(name, config),
            tls=None
            if config.tls is None
            else tls_context(config.tls, folder=context.folder, receiver=name),
        )

    def sender(self, context: ReceiverContext) -> WebhookSender:
        """One session for all webhooks."""
        return WebhookSender(HttpPoster(context.guard, software=context.software))


def _body_of(name: str, config: WebhookReceiver) -> BodyOf:
    kind = "" if config.template is None else config.template.content_type
    template = usable_template(config.template, escape_for(kind), name)
    if template is not None:
        return partial(templated, template, kind)
    bodies: dict[BodyName, BodyOf] = {
        "cloudevents": structured,
        "cloudevents-binary": binary,
        "alertmanager-v4": partial(alertmanager_v4, name),
    }
    return bodies[config.body or "cloudevents"]
