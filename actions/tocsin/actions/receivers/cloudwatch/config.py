"""What may be configured of AWS CloudWatch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig


class CloudWatchReceiver(ReceiverConfig):
    """Writes each issue to a log group of AWS CloudWatch, where it also counts as a metric; with
    the machine's AWS credentials; needs the extra `actions`."""

    type: Literal["cloudwatch"] = Field(examples=["cloudwatch"])
    """The kind of receiver."""
    log_group: str = Field(
        max_length=512, pattern=r"^[A-Za-z0-9_./#-]+$", examples=["/ml/training-alerts"]
    )
    """The log group, which must exist."""
    log_stream: str = Field(
        default="tocsin", max_length=512, pattern=r"^[^:*\x00-\x1f]+$", examples=["tocsin"]
    )
    """The log stream; tocsin creates it if it does not exist."""
    namespace: str = Field(
        default="tocsin", max_length=255, pattern=r"^[A-Za-z0-9_./#-]+$", examples=["ml/training"]
    )
    """The namespace of the metrics."""
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", examples=["eu-central-1"]
    )
    """AWS region. Absent: that of the AWS configuration."""
