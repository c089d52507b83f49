"""Configuration of a webhook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import Secret, TextOrSecret, UrlOrSecret


class SignConfig(Section):
    """How a webhook is signed, so that its receiver can recognise forged ones."""

    scheme: Literal["standard"] = Field(default="standard", examples=["standard"])
    """`standard`: the signature of Standard Webhooks (HMAC-SHA256)."""
    key: Secret = Field(examples=[{"secret": "hook"}])
    """The signing key."""
    previous_key: Secret | None = Field(default=None, examples=[{"secret": "hook_old"}])
    """The previous key, while you replace it: both signatures are sent."""


class WebhookReceiver(ReceiverConfig):
    """Posts each issue as a CloudEvent to a URL."""

    LATER_KEYS = frozenset({"body", "tls"})

    type: Literal["webhook"] = Field(examples=["webhook"])
    """The kind of receiver."""
    url: UrlOrSecret = Field(examples=["https://hooks.example.com/ml", {"secret": "slack"}])
    """Where to post."""
    headers: Mapping[str, TextOrSecret] = Field(
        default_factory=dict, examples=[{"authorization": {"secret": "token"}}]
    )
    """HTTP headers to add."""
    sign: SignConfig | None = None
    """How to sign; absent: not at all."""
