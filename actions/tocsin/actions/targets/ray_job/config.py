"""What may be configured of a target of Ray jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.sections import TlsConfig
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import Duration, Secret, UrlOrSecret


class RayTarget(TargetConfig):
    """Ends jobs of one Ray cluster, through its Jobs API."""

    type: Literal["ray"] = Field(examples=["ray"])
    """The kind of target."""
    address: UrlOrSecret = Field(examples=["https://ray.example.com:8265"])
    """The cluster's dashboard."""
    token: Secret | None = Field(default=None, examples=[{"secret": "ray_token"}])
    """The cluster's token, where it was started with `RAY_AUTH_MODE=token`. Absent: none."""
    tls: TlsConfig | None = Field(default=None, examples=[{"ca": "tls/ca.pem"}])
    """Authorities of your own, and the client certificate for mutual TLS. Absent: the system's
    authorities, no client certificate."""
    grace: Duration = Field(default=timedelta(seconds=3), examples=["3s"])
    """What Ray gives a job between SIGTERM and SIGKILL: 3s, unless the environment variable
    `RAY_JOB_STOP_WAIT_TIME_S` was set for the job before it was submitted. Unit: a duration."""
