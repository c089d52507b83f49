"""Whom issues are sent to: the kinds of receivers that the configuration file can name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import (
    Duration,
    FilePath,
    MailAddress,
    PhoneNumber,
    Secret,
    TextOrSecret,
    UrlOrSecret,
)


def _between(what: str, values: tuple[str, ...], most: int) -> tuple[str, ...]:
    if not 1 <= len(values) <= most:
        raise ValueError(f"expected 1 to {most} {what}")
    return values


class SignConfig(Section):
    """How a webhook is signed, so that its receiver can tell it from a forged one."""

    scheme: Literal["standard"] = Field(default="standard", examples=["standard"])
    """`standard`: the signature of Standard Webhooks (HMAC-SHA256)."""
    key: Secret = Field(examples=[{"secret": "hook"}])
    """The signing key."""
    previous_key: Secret | None = Field(default=None, examples=[{"secret": "hook_old"}])
    """The key before, while it is being replaced: both signatures are sent."""


class RetryConfig(Section):
    """When to give up a failing delivery."""

    give_up_after: Duration = Field(default=timedelta(hours=24), examples=["24h"])
    """How long after the first attempt. Unit: a duration."""


class WebhookReceiver(Section):
    """Posts each issue as a CloudEvent to a URL."""

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
    send_resolved: bool = Field(default=True, examples=[False])
    """Whether to notify when an issue resolves, too."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When to give up."""


class SmtpConfig(Section):
    """The mail server to hand mail to."""

    host: str = Field(
        min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:-]+$", examples=["mail.example.com"]
    )
    """Its name or address."""
    port: int | None = Field(default=None, ge=1, le=65535, examples=[587])
    """Its port. Absent: 465 with `tls`, 587 with `starttls`, else 25."""
    starttls: bool | None = Field(default=None, examples=[True])
    """Whether to encrypt by STARTTLS, or not send at all. Absent: yes, unless `tls` is on or the
    server is on this machine."""
    tls: bool = Field(default=False, examples=[True])
    """Whether to encrypt from the first byte."""
    ca: FilePath | None = Field(default=None, examples=["tls/ca.pem"])
    """PEM file of the authorities to trust, instead of the system's."""
    username: TextOrSecret | None = Field(default=None, examples=["tocsin"])
    """The user to log in as; absent: no log-in."""
    password: Secret | None = Field(default=None, examples=[{"secret": "mail"}])
    """The password."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.tls and self.starttls:
            raise ValueError("expected either 'tls' or 'starttls', not both")
        if (self.username is None) != (self.password is None):
            raise ValueError("expected 'username' and 'password' together")
        if self.password is not None and self.starttls is False and not self.tls:
            raise ValueError("a password is sent encrypted only: use 'starttls' or 'tls'")
        return self


class EmailReceiver(Section):
    """Sends each issue as an e-mail, with a plot of its data; needs the extra `actions`."""

    type: Literal["email"] = Field(examples=["email"])
    """The kind of receiver."""
    to: tuple[MailAddress, ...] = Field(
        strict=False,
        json_schema_extra={"minItems": 1, "maxItems": 50},
        examples=[["vision@example.com"]],
    )
    """Whom to write to."""
    sender: MailAddress | None = Field(default=None, examples=["tocsin@example.com"])
    """Whom the mail comes from. Absent: `tocsin@` and the name of the machine."""
    smtp: SmtpConfig | None = None
    """The mail server. Absent: the variable `TOCSIN_SMTP`, else the one of this machine."""
    send_resolved: bool = Field(default=True, examples=[False])
    """Whether to send an e-mail when an issue resolves, too, as a reply to the first one."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When to give up."""

    @field_validator("to")
    @classmethod
    def _some(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        return _between("addresses", to, 50)


class ChatReceiver(Section):
    """Sends each issue as a chat message, through apprise; needs the extra `actions`."""

    type: Literal["chat"] = Field(examples=["chat"])
    """The kind of receiver."""
    url: TextOrSecret = Field(examples=[{"secret": "slack"}])
    """URL of apprise, like `slack://TOKEN_A/TOKEN_B/TOKEN_C`, `discord://ID/TOKEN` or
    `tgram://BOT_TOKEN/CHAT_ID`; or the webhook URL that Slack or Discord give."""
    send_resolved: bool = Field(default=True, examples=[False])
    """Whether to notify when an issue resolves, too."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When to give up."""


class SmsReceiver(Section):
    """Sends each issue as a short message through AWS SNS, with the machine's AWS credentials;
    needs the extra `actions`."""

    type: Literal["sms"] = Field(examples=["sms"])
    """The kind of receiver."""
    to: tuple[PhoneNumber, ...] = Field(
        strict=False,
        json_schema_extra={"minItems": 1, "maxItems": 20},
        examples=[["+4915112345678"]],
    )
    """Phone numbers, with their country."""
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", examples=["eu-central-1"]
    )
    """AWS region. Absent: that of the AWS configuration."""
    sender_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z][A-Za-z0-9]{0,10}$", examples=["tocsin"]
    )
    """Name shown as the sender, where the country allows it. Absent: as AWS has it."""
    send_resolved: bool = Field(default=True, examples=[False])
    """Whether to notify when an issue resolves, too."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When to give up."""

    @field_validator("to")
    @classmethod
    def _some(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        return _between("phone numbers", to, 20)


class LambdaReceiver(Section):
    """Calls an AWS Lambda function with each issue as a CloudEvent, with the machine's AWS
    credentials; needs the extra `actions`."""

    type: Literal["lambda"] = Field(examples=["lambda"])
    """The kind of receiver."""
    function: str = Field(
        min_length=1, max_length=170, pattern=r"^[A-Za-z0-9_:.$-]+$", examples=["ml-alerts"]
    )
    """Name or ARN of the function, with `:ALIAS` if it has one."""
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", examples=["eu-central-1"]
    )
    """AWS region. Absent: that of the AWS configuration."""
    send_resolved: bool = Field(default=True, examples=[False])
    """Whether to notify when an issue resolves, too."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When to give up."""


AnyReceiver = WebhookReceiver | EmailReceiver | ChatReceiver | SmsReceiver | LambdaReceiver
Receiver = Annotated[AnyReceiver, Field(discriminator="type")]
"""One receiver, of the kind that its `type` names."""

RECEIVERS: Final[Mapping[str, type[AnyReceiver]]] = {
    "webhook": WebhookReceiver,
    "email": EmailReceiver,
    "chat": ChatReceiver,
    "sms": SmsReceiver,
    "lambda": LambdaReceiver,
}
"""The kinds of receivers, by `type`."""

LATER_OF_RECEIVERS: Final[Mapping[type[BaseModel], frozenset[str]]] = {
    WebhookReceiver: frozenset({"body", "tls"}),
}
"""Keys that a later release will read."""
