"""Jobs whose process says what it is and leaves when it is let, and targets that may end them."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from support.kubernetes.cluster import NODE, Cluster, Kubelet, Object
from support.waiting import HANGS_S
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, TargetContext, TargetJob
from tocsin.actions.targets.kubernetes.backend import KubernetesBackend
from tocsin.actions.targets.kubernetes.config import KindName, KubernetesTarget, Operation
from tocsin.actions.targets.kubernetes.kind import Kubernetes
from tocsin.schemas.records.runs import SchedulerJob

ROOT: Final = Path(__file__).resolve().parents[3]

NAMESPACE: Final = "train"

# As a training does: notes what the emitter would record, then runs until it is told to leave and
# has saved, which takes until the test lets it.
_PROCESS: Final = """
import os, pathlib, signal, sys, time
from tocsin.emitter.process.pod import kubernetes
folder = pathlib.Path(sys.argv[1])
own = folder / os.environ["TOCSIN_POD_UID"]
own.mkdir()
def leave(*_):
    (own / "told").touch()
    while not (folder / "saved").exists():
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(own / "part").write_text(kubernetes(os.environ).model_dump_json())
(own / "part").rename(own / "names")
while not (folder / "fails").exists():
    time.sleep(0.02)
sys.exit(1)
"""

_JOB_SET: Final[Object] = {
    "network": {"enableDNSHostnames": False},
    "successPolicy": {"operator": "All", "targetReplicatedJobs": []},
    "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
}
"""What the webhook of JobSets would have filled in."""

_number = itertools.count(1)


@dataclass
class Training:
    """One job and what its processes wrote into `folder`."""

    kind: KindName
    name: str
    folder: Path
    seen: set[str] = field(default_factory=set)

    @property
    def template(self) -> Object:
        """The pod of `examples/kubernetes/job.yaml`, with our command, on our node."""
        example = yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())
        spec: Object = copy.deepcopy(example["spec"]["template"]["spec"])
        spec |= {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": 100,
            "automountServiceAccountToken": False,
        }
        spec["containers"][0] |= {
            "image": "none",
            "command": [sys.executable, "-c", _PROCESS, str(self.folder)],
        }
        return {"spec": spec}

    def save(self) -> None:
        """Let processes that were told to leave, leave."""
        (self.folder / "saved").touch()

    def new_names(self) -> SchedulerJob | None:
        """What a process recorded that was started since; None if none was."""
        for path in sorted(self.folder.glob("*/names")):
            if path.parent.name not in self.seen:
                self.seen.add(path.parent.name)
                return SchedulerJob.model_validate_json(path.read_text())
        return None

    def told(self, job: SchedulerJob) -> bool:
        """Whether the process of a pod got SIGTERM."""
        return (self.folder / job.names["pod_uid"] / "told").exists()


@dataclass
class Peers:
    """The cluster, its node, and what a test has in it."""

    cluster: Cluster
    kubelet: Kubelet
    folder: Path
    opened: list[KubernetesBackend] = field(default_factory=list)

    async def close(self) -> None:
        """Close the targets."""
        for backend in self.opened:
            await backend.close()

    def training(self, kind: KindName = "job", name: str = "", **spec: Any) -> Training:
        """Create a job. `spec` adds to that of a Job."""
        number = next(_number)
        training = Training(kind, name or f"gpt-{number}", self.folder / str(number))
        training.folder.mkdir()
        path, body = _MANIFESTS[kind](training, spec)
        self.cluster.create(path, {"metadata": {"name": training.name}, **body})
        return training

    def path(self, training: Training) -> str:
        """Of the job."""
        return f"{_MANIFESTS[training.kind](training, {})[0]}/{training.name}"

    async def recorded(self, training: Training) -> SchedulerJob:
        """What the next process of a job records of itself."""
        found: list[SchedulerJob] = []

        def one() -> bool:
            names = training.new_names()
            found.extend([] if names is None else [names])
            return bool(found)

        await self.until(one, f"{training.name} runs")
        return found[0]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Let the node work until it is so."""
        deadline = time.monotonic() + HANGS_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {HANGS_S:g} s: {what}"
            await asyncio.to_thread(self.kubelet.step)
            await asyncio.sleep(0.05)

    async def looked(self, backend: KubernetesBackend, job: TargetJob, *states: str) -> JobSeen:
        """What the target shows as soon as it is one of these."""
        deadline = time.monotonic() + HANGS_S
        while (seen := await backend.inspect(job)).state not in states:
            assert time.monotonic() < deadline, f"not within {HANGS_S:g} s: {states}, but {seen}"
            await asyncio.to_thread(self.kubelet.step)
        return seen

    def target(
        self,
        kind: KindName = "job",
        op: Operation = "suspend",
        *,
        token: str | None = None,
        namespaces: tuple[str, ...] = (NAMESPACE,),
    ) -> KubernetesBackend:
        """A target that logs in with a token; as the administrator without one."""
        path = self.cluster.kubeconfig("target", token or self.cluster.token)
        config = KubernetesTarget(
            type="kubernetes", kind=kind, op=op, namespaces=namespaces, kubeconfig=path
        )
        self.opened.append(Kubernetes().target("k8s", config, context({})))
        return self.opened[-1]


def context(environ: Mapping[str, str]) -> TargetContext:
    """The process around a target."""
    return TargetContext(
        secrets={}, guard=AddressGuard(private=False), folder=Path("/"), environ=environ
    )


def target_job(scheduler: SchedulerJob) -> TargetJob:
    """A stop of the run that recorded this; each pod is an incarnation of its own."""
    return TargetJob(
        run_id="gpt",
        incarnation=scheduler.names.get("pod_uid", "0"),
        scheduler=scheduler,
        started_ms=0,
        delivery_id="5f0c2a9e-0000-4000-8000-000000000001",
        reason="nonfinite: the loss is NaN at step 200",
    )


def _job(training: Training, spec: Object) -> tuple[str, Object]:
    body = {"spec": {"backoffLimit": 3, "template": training.template, **spec}}
    return f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", body


def _jobset(training: Training, spec: Object) -> tuple[str, Object]:
    job = {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
        "template": training.template,
        **spec,
    }
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
    return path, {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "spec": {
            **_JOB_SET,
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _trainjob(training: Training, spec: Object) -> tuple[str, Object]:
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
    return path, {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": "tests",
            },
            "trainer": {
                "numNodes": 2,
                "command": training.template["spec"]["containers"][0]["command"],
            },
            **spec,
        },
    }


def training_runtime(training: Training) -> tuple[str, Object]:
    """What TrainJobs refer to: the shape of their JobSets."""
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainingruntimes"
    template = training.template
    template["spec"]["containers"][0]["name"] = "node"
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = {"completionMode": "Indexed", "backoffLimit": 0, "template": template}
    job = {"metadata": {"labels": labels}, "spec": spec}
    return path, {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "tests"},
        "spec": {
            "mlPolicy": {"numNodes": 1},
            "template": {
                "spec": {**_JOB_SET, "replicatedJobs": [{"name": "node", "template": job}]}
            },
        },
    }


def _pytorchjob(training: Training, spec: Object) -> tuple[str, Object]:
    template = training.template
    # Its controller knows the container by this name.
    template["spec"]["containers"][0]["name"] = "pytorch"
    # Without a master, as elastic jobs are: else its workers would wait for the master's name.
    worker = {"replicas": 2, "restartPolicy": "Never", "template": template}
    path = f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
    return path, {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "spec": {"pytorchReplicaSpecs": {"Worker": worker}, "runPolicy": {}, **spec},
    }


_MANIFESTS: Final[Mapping[KindName, Callable[[Training, Object], tuple[str, Object]]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
}


def shown(found: Object) -> str:
    """An object, for the message of a test."""
    return json.dumps(found, indent=1)
