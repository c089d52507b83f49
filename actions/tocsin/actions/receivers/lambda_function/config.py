"""Configuration of a Lambda function."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig


class LambdaReceiver(ReceiverConfig):
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
