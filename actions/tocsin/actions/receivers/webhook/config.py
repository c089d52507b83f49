"""Configuration of a webhook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from tocsin.actions.receivers.templates.config import TemplateConfig
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.sections import Section, TlsConfig
from tocsin.schemas.configuration.values import Secret, TextOrSecret, UrlOrSecret


class SignConfig(Section):
    """How a webhook is signed, so that its receiver can recognise forged ones."""

    scheme: Literal["standard"] = Field(default="standard", examples=["standard"])
    """`standard`: the signature of Standard Webhooks (HMAC-SHA256)."""
    key: Secret = Field(examples=[{"secret": "hook"}])
    """The signing key."""
    previous_key: Secret | None = Field(default=None, examples=[{"secret": "hook_old"}])
    """The previous key, while you replace it: both signatures are sent."""


BodyName = Literal["cloudevents", "cloudevents-binary", "alertmanager-v4"]


class WebhookTemplate(TemplateConfig):
    """A body of your own. Each value is escaped in the way of the content type."""

    content_type: str = Field(
        default="application/json",
        max_length=100,
        pattern=r"^[a-z]+/[a-z0-9.+-]+(; ?charset=utf-8)?$",
        examples=["application/json"],
    )
    """What the body is: JSON, HTML, XML and `application/x-www-form-urlencoded` each have their
    own way to escape; in all others values stand as they are, in one line."""


class WebhookReceiver(ReceiverConfig):
    """Posts each issue to a URL."""

    type: Literal["webhook"] = Field(examples=["webhook"])
    """The kind of receiver."""
    url: UrlOrSecret = Field(examples=["https://hooks.example.com/ml", {"secret": "slack"}])
    """Where to post."""
    headers: Mapping[str, TextOrSecret] = Field(
        default_factory=dict, examples=[{"authorization": {"secret": "token"}}]
    )
    """HTTP headers to add."""
    body: BodyName | None = Field(default=None, examples=["alertmanager-v4"])
    """What is posted: `cloudevents` is a CloudEvent whose parts are all in the body,
    `cloudevents-binary` one whose attributes are headers, `alertmanager-v4` what the webhooks of
    Alertmanager post. Absent: `cloudevents`, or the template."""
    template: WebhookTemplate | None = None
    """A body of your own, instead of `body`."""
    sign: SignConfig | None = None
    """How to sign; absent: not at all."""
    tls: TlsConfig | None = Field(default=None, examples=[{"ca": "tls/ca.pem"}])
    """Authorities of your own, and the client certificate for mutual TLS. Absent: the system's
    authorities, no client certificate."""

    @model_validator(mode="after")
    def _one_body(self) -> Self:
        if self.body is not None and self.template is not None:
            raise ValueError("expected either 'body' or 'template', not both")
        return self
