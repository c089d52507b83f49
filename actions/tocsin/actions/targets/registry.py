"""The kinds of stop targets: those that tocsin has, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Final

from tocsin.actions.kinds import Kinds
from tocsin.actions.targets.kind import AnyTargetKind, TargetKind
from tocsin.schemas.configuration.targets import TargetConfig

GROUP: Final = "tocsin.stop_targets"
"""The entry points by which a package offers kinds: the kind's name, and its class."""

BUILT_IN: Final[Mapping[str, str]] = {
    "slurm": "tocsin.actions.targets.slurm.kind:Slurm",
    "kubernetes": "tocsin.actions.targets.kubernetes.kind:Kubernetes",
    "sagemaker": "tocsin.actions.targets.sagemaker.kind:SageMaker",
    "batch": "tocsin.actions.targets.batch.kind:Batch",
    "ray": "tocsin.actions.targets.ray_job.kind:Ray",
    "webhook": "tocsin.actions.targets.webhook.kind:Webhook",
}
"""By the `type` of the configuration."""


class TargetKinds(Kinds[AnyTargetKind, TargetConfig]):
    """All kinds of stop targets by name."""

    def __init__(self, installed: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        super().__init__("stop target", TargetKind, BUILT_IN, GROUP, installed)
