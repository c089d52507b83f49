"""Configuration of a receiver of text messages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tocsin.actions.receivers.recipients import between
from tocsin.actions.receivers.templates.config import TemplateConfig
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import PhoneNumber


class SmsReceiver(ReceiverConfig):
    """Sends each issue as a text message through AWS SNS, with the machine's AWS credentials;
    needs the extra `actions`."""

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

    template: TemplateConfig | None = None
    """A message of your own, cut to two parts. Absent: run, what has happened and the step."""

    @field_validator("to")
    @classmethod
    def _some(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        return between("phone numbers", to, 20)
