"""Configuration of a receiver of text messages."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from tocsin.actions.receivers.recipients import between
from tocsin.actions.receivers.templates.config import TemplateConfig
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import PhoneNumber, Secret


class TwilioConfig(Section):
    """An account of Twilio."""

    account: str = Field(pattern=r"^AC[0-9a-fA-F]{32}$", examples=["AC" + "0" * 32])
    """The account's SID."""
    token: Secret = Field(examples=[{"secret": "twilio"}])
    """Its authentication token."""
    sender: PhoneNumber = Field(examples=["+14155550100"])
    """The number that messages come from."""


class SmsReceiver(ReceiverConfig):
    """Sends each issue as a text message through AWS SNS, with the machine's AWS credentials, or
    through Twilio; needs the extra `actions`."""

    type: Literal["sms"] = Field(examples=["sms"])
    """The kind of receiver."""
    to: tuple[PhoneNumber, ...] = Field(
        strict=False,
        json_schema_extra={"minItems": 1, "maxItems": 20},
        examples=[["+4915112345678"]],
    )
    """Phone numbers with country code."""
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", examples=["eu-central-1"]
    )
    """AWS region. Absent: that of the AWS configuration."""
    sender_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z][A-Za-z0-9]{0,10}$", examples=["tocsin"]
    )
    """Sender name, where the country allows one. Absent: the default of AWS."""
    twilio: TwilioConfig | None = None
    """Send through Twilio. Absent: through AWS SNS."""

    template: TemplateConfig | None = None
    """A message of your own, cut to two parts. Absent: run, what has happened and the step."""

    @field_validator("to")
    @classmethod
    def _some(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        return between("phone numbers", to, 20)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.twilio is not None and (self.region or self.sender_id):
            raise ValueError("expected either 'twilio', or 'region' and 'sender_id' of AWS")
        return self
