"""What may be configured of a Slurm cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.sections import Section, TlsConfig
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import Secret, UrlOrSecret


class SlurmRest(Section):
    """The REST API of a cluster, slurmrestd, with a token of `scontrol token`."""

    url: UrlOrSecret = Field(examples=["https://slurm.example.com:6820"])
    """Where slurmrestd listens."""
    api: str = Field(pattern=r"^v0\.0\.[0-9]{2}$", examples=["v0.0.41"])
    """The version of the API; `slurmrestd -s list` shows what a Slurm has: v0.0.38 or newer."""
    user: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$", examples=["tocsin"])
    """The user that the token is for: the owner of the jobs, or an operator of Slurm."""
    token: Secret = Field(examples=[{"secret": "slurm"}])
    """The JSON web token. It must not expire while the service runs."""
    tls: TlsConfig | None = None
    """How to check the server, and log in with a certificate. Absent: the system's authorities."""


class SlurmTarget(TargetConfig):
    """Ends jobs of a Slurm cluster, by its commands or its REST API.

    The commands `scontrol`, `squeue` and `scancel` of this machine reach the cluster of its
    `slurm.conf`, or of the one that the variable SLURM_CONF names."""

    type: Literal["slurm"] = Field(examples=["slurm"])
    """The kind of target."""
    rest: SlurmRest | None = None
    """Ask this slurmrestd. Absent: run the commands."""
