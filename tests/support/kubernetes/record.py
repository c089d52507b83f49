"""Record what a real Kubernetes answers, for the unit tests: `python -m support.kubernetes.record`.

Needs `tests` on the path, and the programs (`support.kubernetes.build`).
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from support.kubernetes.build import programs
from support.kubernetes.cluster import Kubelet, kubernetes_cluster
from support.kubernetes.exchanges import Recording, RecordingApi
from support.kubernetes.trainings import (
    NAMESPACE,
    Peers,
    Training,
    target_job,
    training_runtime,
)
from tocsin.actions.targets.kubernetes.backend import KubernetesBackend
from tocsin.actions.targets.kubernetes.config import KindName, KubernetesTarget, Operation
from tocsin.actions.targets.kubernetes.credentials import from_kubeconfig


async def stopped(peers: Peers, kind: KindName, op: Operation) -> None:
    """A job is looked at, ended, looked at while it saves and when it has, and asked once more."""
    training = peers.training(kind)
    scheduler = await peers.recorded(training)
    if kind != "job":
        await peers.recorded(training)
    job = target_job(scheduler)
    api = RecordingApi(from_kubeconfig(peers.cluster.kubeconfig("record", peers.cluster.token)))
    api.recording = recording = Recording(scheduler)
    backend = KubernetesBackend(
        KubernetesTarget(type="kubernetes", kind=kind, op=op, namespaces=(NAMESPACE,)), api
    )
    assert (await backend.inspect(job)).state == "running"
    assert (await backend.stop(job)).result == "accepted"
    await peers.until(lambda: training.told(scheduler), "it got SIGTERM")
    assert (await backend.inspect(job)).state == "running"
    training.save()
    # The looks in between are not recorded: how many there are differs.
    kept = list(recording.exchanges)
    await peers.looked(backend, job, "ended")
    recording.exchanges[:] = kept
    assert (await backend.inspect(job)).state == "ended"
    assert (await backend.stop(job)).result == "accepted"
    if op == "suspend" and kind == "job":
        peers.cluster.call("PATCH", peers.path(training), {"spec": {"suspend": False}})
        await peers.recorded(training)
        assert (await backend.inspect(job)).state == "replaced"
        assert (await backend.stop(job)).result == "refused"
    await backend.close()
    recording.save(f"{op}-{kind}")


async def record(folder: Path) -> None:
    """All recordings."""
    (folder / "kubernetes").mkdir()
    (folder / "trainings").mkdir()
    with kubernetes_cluster(folder / "kubernetes", programs()) as cluster:
        cluster.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        cluster.start_operators()
        cluster.create(*training_runtime(Training("trainjob", "runtime", Path("/"))))
        kubelet = Kubelet(cluster)
        try:
            peers = Peers(cluster, kubelet, folder / "trainings")
            for kind, op in (
                ("job", "suspend"),
                ("job", "delete"),
                ("jobset", "suspend"),
                ("trainjob", "suspend"),
                ("pytorchjob", "suspend"),
            ):
                await stopped(peers, kind, op)  # type: ignore[arg-type]
        finally:
            kubelet.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tocsin-k") as name:
        asyncio.run(record(Path(name)))
