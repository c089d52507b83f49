"""What may be configured of a target of AWS Batch."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from tocsin.actions.targets.aws import REGION
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import Duration


class BatchTarget(TargetConfig):
    """Ends jobs of AWS Batch, with the machine's AWS credentials."""

    type: Literal["batch"] = Field(examples=["batch"])
    """The kind of target."""
    grace: Duration = Field(default=timedelta(seconds=30), examples=["30s"])
    """What Batch gives a job between SIGTERM and SIGKILL: always 30s. Unit: a duration."""
    region: str | None = Field(default=None, pattern=f"^{REGION}$", examples=["eu-central-1"])
    """AWS region of the jobs. Absent: the one that a run recorded of its job, else that of the AWS
    configuration."""
