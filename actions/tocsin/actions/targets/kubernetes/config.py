"""What may be configured of a stop target in Kubernetes."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import FilePath

KindName = Literal["job", "trainjob", "pytorchjob", "jobset"]
Operation = Literal["suspend", "delete"]

_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


def _namespaces(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise ValueError("expected at least one namespace")
    for value in values:
        if not _NAMESPACE.fullmatch(value):
            raise ValueError(
                "expected names of namespaces: lower-case letters, digits and '-' (63 at most)"
            )
    return values


class KubernetesTarget(TargetConfig):
    """Suspends or deletes the job that a run belongs to; needs the extra `actions`."""

    type: Literal["kubernetes"] = Field(examples=["kubernetes"])
    """The kind of target."""
    kind: KindName = Field(examples=["job"])
    """What the jobs are: a `job` of Kubernetes, a `jobset`, a `trainjob` (Kubeflow Trainer), a
    `pytorchjob` (Kubeflow Training Operator)."""
    op: Operation = Field(default="suspend", examples=["suspend"])
    """How to end a job: `suspend` keeps it, and somebody can resume it; `delete` removes it."""
    namespaces: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_namespaces)] = (
        Field(examples=[["train"]])
    )
    """The namespaces in which jobs may be ended. A run elsewhere is refused."""
    kubeconfig: FilePath | None = Field(default=None, examples=["kube/stopper.config"])
    """How to reach the API server. Absent: with the service account of the pod."""
    context: str | None = Field(default=None, min_length=1, examples=["training"])
    """The context of the kubeconfig. Absent: its current one."""
