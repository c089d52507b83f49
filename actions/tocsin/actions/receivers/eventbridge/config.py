"""What may be configured of an event bus of AWS EventBridge."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig


class EventBridgeReceiver(ReceiverConfig):
    """Puts each issue as an event on a bus of AWS EventBridge, with the machine's AWS
    credentials; needs the extra `actions`."""

    type: Literal["eventbridge"] = Field(examples=["eventbridge"])
    """The kind of receiver."""
    event_bus: str = Field(
        default="default",
        max_length=400,
        pattern=r"^[A-Za-z0-9_:./-]+$",
        examples=["ml-alerts"],
    )
    """Name or ARN of the event bus."""
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", examples=["eu-central-1"]
    )
    """AWS region. Absent: that of the AWS configuration."""
