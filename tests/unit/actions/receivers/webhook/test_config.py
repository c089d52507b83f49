"""What `tocsin check` finds wrong with a webhook, and what one that is right posts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from support.actions.notices import notice
from support.records.issues import issue
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.webhook.config import WebhookReceiver
from tocsin.actions.receivers.webhook.kind import Webhook
from tocsin.actions.receivers.webhook.sender import WebhookTarget
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config

CONTEXT = ReceiverContext(
    secrets={"new": SecretStr("a"), "old": SecretStr("b")},
    guard=AddressGuard(private=True),
    folder=Path(),
    environ={},
)


def target(**settings: Any) -> WebhookTarget:
    given = {"type": "webhook", "url": "https://hooks.example.com", **settings}
    made = Webhook().target("ml", WebhookReceiver.model_validate(given), CONTEXT)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("settings", "column", "words"),
    [
        ("body: template", 53, "expected cloudevents, cloudevents-binary or alertmanager-v4"),
        ("body: cloudevents, template: {text: x}", 16, "either 'body' or 'template', not both"),
        ("headers: {ce-type: x}", 57, "the header 'ce-type' is set by tocsin"),
        ("tls: {key: k.pem}", 52, "expected 'certificate' and 'key' together"),
        ("tls: {}", 47, "expected an https:// URL with it"),
        ("template: {text: '{headlin}'}", 64, "line 1, column 1 of the template: there is no"),
        ("template: {text: '{{ 9 ** 9 }}', language: jinja}", 64, "'pow' is not allowed"),
        ("template: {text: '{rule}'}", 64, "it is not JSON from line 1, column 1"),
    ],
)
def test_mistakes_have_their_places(settings: str, column: int, words: str) -> None:
    text = f"version: 1\nreceivers: {{a: {{type: webhook, url: http://x, {settings}}}}}"
    _, problems = check_config(text, "tocsin.yaml", section_registry())

    assert [(one.line, one.column) for one in problems] == [(2, column)]
    assert words in problems[0].message


def test_each_body_is_chosen_by_name() -> None:
    given = notice(issue())
    types = {
        name: target(body=name).body(given).content_type
        for name in ("cloudevents", "cloudevents-binary", "alertmanager-v4")
    }
    assert types == {
        "cloudevents": "application/cloudevents+json; charset=utf-8",
        "cloudevents-binary": "application/json; charset=utf-8",
        "alertmanager-v4": "application/json; charset=utf-8",
    }
    own = {"text": '{"say": "{headline}"}'}
    body = target(template=own).body(notice(issue().model_copy(update={"reason": 'a "b" \\'})))
    assert json.loads(body.content) == {"say": 'a "b" \\'}
    assert body.content_type == "application/json"


def test_both_keys_sign_while_one_replaces_the_other() -> None:
    keys = target(sign={"key": {"secret": "new"}, "previous_key": {"secret": "old"}}).keys
    assert [key.get_secret_value() for key in keys] == ["a", "b"]
