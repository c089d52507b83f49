"""What may be configured of a queue of AWS SQS."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig


class SqsReceiver(ReceiverConfig):
    """Sends each issue as a CloudEvent to a queue of AWS SQS, with the machine's AWS
    credentials; needs the extra `actions`."""

    type: Literal["sqs"] = Field(examples=["sqs"])
    """The kind of receiver."""
    queue: str = Field(
        max_length=500,
        pattern=r"^https://[A-Za-z0-9.-]+/[A-Za-z0-9_./-]+$",
        examples=["https://sqs.eu-central-1.amazonaws.com/123456789012/ml-alerts"],
    )
    """URL of the queue."""
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", examples=["eu-central-1"]
    )
    """AWS region. Absent: that of the AWS configuration."""
