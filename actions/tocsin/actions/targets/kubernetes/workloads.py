"""The kinds of jobs: where the API server has them, how one is suspended, what runs below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from tocsin.actions.targets.kubernetes.config import KindName


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of the API, as an owner reference and as a path name it."""

    group: str
    version: str
    kind: str
    plural: str

    def path(self, namespace: str, name: str) -> str:
        """The path of one object, below the URL of the API server."""
        return f"/apis/{self.group}/{self.version}/namespaces/{namespace}/{self.plural}/{name}"


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of job.

    Attributes:
        owners: from a pod upwards, each the controller of what is below; the last is the job.
        pod_label: what its pods carry, with the job's name.
        suspend: the way to the field that suspends it.
    """

    owners: tuple[Resource, ...]
    pod_label: str
    suspend: tuple[str, ...] = ("spec", "suspend")

    @property
    def resource(self) -> Resource:
        """The job itself."""
        return self.owners[-1]

    def suspended(self) -> dict[str, JsonValue]:
        """A merge patch that suspends a job."""
        patch: dict[str, JsonValue] = {self.suspend[-1]: True}
        for key in reversed(self.suspend[:-1]):
            patch = {key: patch}
        return patch

    def asks_to_suspend(self, job: Mapping[str, JsonValue]) -> bool:
        """Whether somebody has asked a job to be suspended."""
        value: JsonValue = dict(job)
        for key in self.suspend:
            value = value.get(key) if isinstance(value, dict) else None
        return value is True


JOB: Final = Resource("batch", "v1", "Job", "jobs")
JOB_SET: Final = Resource("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets")
TRAIN_JOB: Final = Resource("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs")
PYTORCH_JOB: Final = Resource("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs")

_JOB_SET_NAME: Final = "jobset.sigs.k8s.io/jobset-name"

WORKLOADS: Final[Mapping[KindName, Workload]] = {
    "job": Workload((JOB,), "batch.kubernetes.io/job-name"),
    "jobset": Workload((JOB, JOB_SET), _JOB_SET_NAME),
    # The trainer makes a JobSet of the same name.
    "trainjob": Workload((JOB, JOB_SET, TRAIN_JOB), _JOB_SET_NAME),
    "pytorchjob": Workload(
        (PYTORCH_JOB,), "training.kubeflow.org/job-name", ("spec", "runPolicy", "suspend")
    ),
}
