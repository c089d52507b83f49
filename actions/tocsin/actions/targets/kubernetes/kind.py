"""Targets in Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable

from tocsin.actions.targets.kind import TargetContext, TargetKind
from tocsin.actions.targets.kubernetes.api import KubernetesApi
from tocsin.actions.targets.kubernetes.backend import KubernetesBackend
from tocsin.actions.targets.kubernetes.config import KubernetesTarget
from tocsin.actions.targets.kubernetes.credentials import from_kubeconfig, in_cluster
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.errors import ConfigurationError


class Kubernetes(TargetKind[KubernetesTarget]):
    """Suspends or deletes jobs of one kind, in the namespaces that are named."""

    config = KubernetesTarget
    scheduler = "kubernetes"
    libraries = ("aiohttp",)

    def check(self, config: KubernetesTarget, loc: Loc) -> Iterable[Problem]:
        """A context is one of a kubeconfig."""
        if config.context is not None and config.kubeconfig is None:
            yield Problem(
                (*loc, "context"),
                "expected 'kubeconfig', too: a pod's service account has no contexts",
            )

    def target(
        self, name: str, config: KubernetesTarget, context: TargetContext
    ) -> KubernetesBackend:
        """Reads the kubeconfig, or looks for the pod's service account."""
        try:
            if config.kubeconfig is None:
                cluster = in_cluster(context.environ)
            else:
                cluster = from_kubeconfig(context.folder / config.kubeconfig, config.context)
        except ConfigurationError as error:
            raise ConfigurationError(f"target {name!r}: {error}") from None
        return KubernetesBackend(config, KubernetesApi(cluster))
