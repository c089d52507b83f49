"""What may be configured of a service that ends jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from tocsin.actions.receivers.webhook.config import SignConfig
from tocsin.schemas.configuration.sections import TlsConfig
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import Names, TextOrSecret, UrlOrSecret


class WebhookStopTarget(TargetConfig):
    """Asks a service of your own to end a job, by a signed request."""

    type: Literal["webhook"] = Field(examples=["webhook"])
    """The kind of target."""
    url: UrlOrSecret = Field(examples=["https://jobs.example.com/stop"])
    """Where to post the request."""
    status_url: UrlOrSecret = Field(examples=["https://jobs.example.com/status"])
    """What to ask for the state of the job, before and after the request, until the job is gone.
    The job is in the query: `run`, `incarnation`, `stop`."""
    sign: SignConfig = Field(examples=[{"key": {"secret": "stop_key"}}])
    """How to sign the request, so that the service can recognise forged ones."""
    headers: Mapping[str, TextOrSecret] = Field(
        default_factory=dict, examples=[{"authorization": {"secret": "token"}}]
    )
    """HTTP headers to add to both."""
    tls: TlsConfig | None = Field(default=None, examples=[{"ca": "tls/ca.pem"}])
    """Authorities of your own, and the client certificate for mutual TLS. Absent: the system's
    authorities, no client certificate."""
    schedulers: Names = Field(default=(), examples=[["lsf", "slurm"]])
    """Which schedulers' jobs the service can end. Absent: all of them."""
