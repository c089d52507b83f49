from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from pydantic import SecretStr
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tocsin.actions.receivers.webhook.signature import sign, webhook_key
from tocsin.schemas.errors import ConfigurationError

NEW = SecretStr("whsec_" + base64.b64encode(b"k" * 32).decode())
OLD = SecretStr("a plain old secret")
BODY = '{"data":{"run_id":"läuft-1"}}'.encode()


def headers(*keys: SecretStr) -> dict[str, str]:
    timestamp_s = int(datetime.now(UTC).timestamp())
    return {
        "webhook-id": "d-1",
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": sign(keys, id="d-1", timestamp_s=timestamp_s, body=BODY),
    }


def test_the_reference_library_verifies_it() -> None:
    Webhook(NEW.get_secret_value()).verify(BODY, headers(NEW))
    Webhook(OLD.get_secret_value().encode()).verify(BODY, headers(OLD))


def test_while_keys_are_replaced_both_verify() -> None:
    both = headers(NEW, OLD)
    Webhook(NEW.get_secret_value()).verify(BODY, both)
    Webhook(OLD.get_secret_value().encode()).verify(BODY, both)


def test_another_key_or_body_does_not_verify() -> None:
    with pytest.raises(WebhookVerificationError):
        Webhook(base64.b64encode(b"x" * 32).decode()).verify(BODY, headers(NEW))
    with pytest.raises(WebhookVerificationError):
        Webhook(NEW.get_secret_value()).verify(BODY + b" ", headers(NEW))


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_not base64!", "whsec_abc"])
def test_a_key_that_is_none_is_said_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        webhook_key(SecretStr(text), "receiver 'ml'")
    assert "receiver 'ml'" in str(caught.value)
    assert "not base64!" not in str(caught.value)
