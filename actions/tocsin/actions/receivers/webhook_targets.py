"""The webhooks of a configuration, with their secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from pydantic import SecretStr

from tocsin.actions.receivers.notify_option import parse_notify
from tocsin.actions.receivers.webhook import WebhookTarget
from tocsin.actions.receivers.webhook_signature import webhook_key
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.receivers import (
    WebhookReceiver,
)
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.configuration.values import parse_http_url
from tocsin.schemas.errors import ConfigurationError


def webhook_targets(
    config: Config, secrets: Mapping[str, SecretStr], notify: Sequence[str] = ()
) -> dict[str, WebhookTarget]:
    """The webhooks by name, those of `--notify` among them by `notify_names`.

    Raises:
        ConfigurationError: a URL or key cannot be used. The message shows no secret.
    """
    targets: dict[str, WebhookTarget] = {}
    for name, receiver in config.receivers.items():
        if not isinstance(receiver, WebhookReceiver):
            continue
        if (target := _target(name, receiver, secrets)) is not None:
            targets[name] = target
    for address in map(parse_notify, notify):
        if address.kind == "webhook":
            targets[address.name] = WebhookTarget(address.name, address.url)
    return targets


def _target(
    name: str, receiver: WebhookReceiver, secrets: Mapping[str, SecretStr]
) -> WebhookTarget | None:
    """None if its URL is an optional secret that is missing: then the receiver is not there."""
    what = f"receiver {name!r}"
    url = value_of(receiver.url, secrets)
    if url is None:
        return None
    keys: list[SecretStr] = []
    if receiver.sign is not None:
        for reference in (receiver.sign.key, receiver.sign.previous_key):
            if reference is not None and (key := value_of(reference, secrets)) is not None:
                keys.append(webhook_key(key, what))
        if not keys:
            raise ConfigurationError(f"{what}: it is to be signed, but there is no key")
    headers: dict[str, SecretStr] = {}
    for header, text in receiver.headers.items():
        if (value := value_of(text, secrets)) is not None:
            if not value.get_secret_value().isprintable():
                raise ConfigurationError(
                    f"{what}: the header {header!r} has a line break or control character"
                )
            headers[header] = value
    give_up_ms = receiver.retry.give_up_after // timedelta(milliseconds=1)
    return WebhookTarget(name, _url(url, what), headers, tuple(keys), give_up_ms)


def _url(url: SecretStr, what: str) -> SecretStr:
    try:
        parse_http_url(url.get_secret_value())
    except ValueError as error:
        raise ConfigurationError(f"{what}: {error}") from None
    return url
