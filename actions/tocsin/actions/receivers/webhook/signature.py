"""The signature of Standard Webhooks, version 1: HMAC-SHA256 over id, timestamp and body."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence
from typing import Final

from pydantic import SecretStr

from tocsin.schemas.errors import ConfigurationError

_PREFIX: Final = "whsec_"


def webhook_key(secret: SecretStr, what: str) -> SecretStr:
    """Check a signing key: `whsec_` with base64, or any other text as it is. Returns it.

    Raises:
        ConfigurationError: base64 was announced and is none; the message shows nothing of it.
    """
    try:
        if not _raw(secret):
            raise ConfigurationError(f"{what}: the signing key is empty")
    except (binascii.Error, ValueError) as error:
        raise ConfigurationError(
            f"{what}: the signing key begins with {_PREFIX} but is not base64 after it"
        ) from error
    return secret


def sign(keys: Sequence[SecretStr], *, id: str, timestamp_s: int, body: bytes) -> str:
    """The header `webhook-signature`: one signature per key, while keys are being replaced."""
    message = f"{id}.{timestamp_s}.".encode() + body
    signatures = (hmac.digest(_raw(key), message, "sha256") for key in keys)
    return " ".join(f"v1,{base64.b64encode(value).decode()}" for value in signatures)


def signed_headers(
    keys: Sequence[SecretStr], *, id: str, timestamp_s: int, body: bytes
) -> dict[str, str]:
    """The headers of Standard Webhooks; without a key, all but the signature."""
    headers = {"webhook-id": id, "webhook-timestamp": str(timestamp_s)}
    if keys:
        headers["webhook-signature"] = sign(keys, id=id, timestamp_s=timestamp_s, body=body)
    return headers


def _raw(secret: SecretStr) -> bytes:
    text = secret.get_secret_value()
    if text.startswith(_PREFIX):
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    return text.encode()
