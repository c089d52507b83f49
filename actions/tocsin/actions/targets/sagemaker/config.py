"""What may be configured of a target of SageMaker training jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from tocsin.actions.targets.aws import REGION
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import Duration


class SageMakerTarget(TargetConfig):
    """Ends SageMaker training jobs, with the machine's AWS credentials."""

    type: Literal["sagemaker"] = Field(examples=["sagemaker"])
    """The kind of target."""
    grace: Duration = Field(default=timedelta(seconds=120), examples=["120s"])
    """What SageMaker gives a job between SIGTERM and SIGKILL: always 120s. Unit: a duration."""
    confirm_within: Duration = Field(default=timedelta(minutes=10), examples=["10m"])
    """How long to look for the state `Stopped` after SageMaker was asked; then the stop expires.
    After the job, SageMaker uploads its model. Unit: a duration."""
    region: str | None = Field(default=None, pattern=f"^{REGION}$", examples=["eu-central-1"])
    """AWS region of the jobs. Absent: the one that a run recorded of its job."""
