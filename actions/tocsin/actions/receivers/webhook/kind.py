"""Webhooks, with their secrets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

from tocsin.actions.receivers.http import HttpPoster, http_url, tls_context
from tocsin.actions.receivers.kind import Address, ReceiverContext, ReceiverKind
from tocsin.actions.receivers.templates.template import (
    escape_for,
    is_json,
    names_actions,
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
from tocsin.actions.receivers.webhook.endpoint import (
    header_problems,
    header_values,
    signing_keys,
    tls_problems,
)
from tocsin.actions.receivers.webhook.sender import WebhookSender, WebhookTarget
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.configuration.values import parse_http_url


class Webhook(ReceiverKind[WebhookReceiver, WebhookTarget]):
    """Posts each issue to a URL."""

    config = WebhookReceiver
    libraries = ("aiohttp",)
    called = "a webhook receiver"

    def check(self, config: WebhookReceiver, loc: Loc) -> Iterator[Problem]:
        """Headers that are none, ours, or there twice; TLS files without TLS; a wrong template."""
        yield from tls_problems(config.tls, (config.url,), loc)
        kind = "" if config.template is None else config.template.content_type
        json_body = is_json(kind)
        yield from template_findings(config.template, escape_for(kind), loc, json_body=json_body)
        yield from header_problems(config.headers, loc)

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
        return WebhookTarget(
            name,
            http_url(url, what),
            header_values(config.headers, context.secrets, what),
            () if config.sign is None else signing_keys(config.sign, context.secrets, what),
            body=_body_of(name, config),
            tls=None
            if config.tls is None
            else tls_context(config.tls, folder=context.folder, what=what),
        )

    def digests(self, config: WebhookReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return config.template is None and config.body != "alertmanager-v4"

    def shows_question(self, config: WebhookReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. A CloudEvent is
        the issue alone."""
        return config.body == "alertmanager-v4" or names_actions(config.template)

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
