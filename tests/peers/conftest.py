"""Fixtures of tests against the real services of others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.kubernetes import build
from support.kubernetes.cluster import Cluster, Kubelet, kubernetes_cluster
from support.kubernetes.trainings import NAMESPACE, Peers, Training, training_runtime


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Kubernetes with the namespaces that the manifests of deploy/ name, and one more."""
    reason = build.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with kubernetes_cluster(tmp_path_factory.mktemp("kubernetes"), build.programs()) as found:
        for name in (NAMESPACE, "tocsin", "other"):
            found.create("/api/v1/namespaces", {"metadata": {"name": name}})
        yield found


@pytest.fixture(scope="session")
def operators(cluster: Cluster) -> Cluster:
    """The same with the controllers of Kubeflow and of JobSets."""
    cluster.start_operators()
    cluster.create(*training_runtime(Training("trainjob", "runtime", Path("/"))))
    return cluster


@pytest.fixture
async def peers(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Peers]:
    """What a test does there; its jobs and their processes are gone afterwards."""
    kubelet = Kubelet(cluster)
    found = Peers(cluster, kubelet, tmp_path)
    try:
        yield found
    finally:
        await found.close()
        kubelet.close()
        for path in (
            f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
            f"/api/v1/namespaces/{NAMESPACE}/pods",
        ):
            grace = "?gracePeriodSeconds=0&propagationPolicy=Background"
            cluster.call("DELETE", path + grace)
