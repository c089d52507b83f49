"""What an API server would answer of a JobSet, a TrainJob and a PyTorchJob that are suspended.

Derived, not recorded. The pods and the Job are those that a real API server answered
(`fixtures/kubernetes/suspend-job.json`), with other owners, names and labels. What is above them is
written after the descriptions of these kinds (CRDs) and constants in their controllers' sources,
of the versions in `build`: jobset_types.go and constants.go of JobSet, trainjob_types.go of the
trainer, common_types.go and status.go of the training operator. `tests/peers` checks that each
object fits its CRD, and stops real ones; `record` records these, where the cluster is built.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final, Literal

from support.kubernetes.exchanges import Exchange, Recording
from support.kubernetes.trainings import NAMESPACE

Kind = Literal["jobset", "trainjob", "pytorchjob"]
Object = dict[str, Any]

NAME: Final = "gpt"
CHILD: Final = "gpt-node-0"
"""The Job that JobSet makes of its replicated job `node`."""

_AT: Final = "2026-11-24T00:28:34Z"
_LATER: Final = "2026-11-24T00:28:35Z"
_UIDS: Final = {
    "Job": "1a2f6c3e-0000-4000-8000-00000000000a",
    "JobSet": "1a2f6c3e-0000-4000-8000-00000000000b",
    "TrainJob": "1a2f6c3e-0000-4000-8000-00000000000c",
    "PyTorchJob": "1a2f6c3e-0000-4000-8000-00000000000d",
}
_VERSIONS: Final = {
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
}
_OWNERS: Final[dict[Kind, tuple[str, ...]]] = {
    "jobset": ("Job", "JobSet"),
    "trainjob": ("Job", "JobSet", "TrainJob"),
    "pytorchjob": ("PyTorchJob",),
}
"""From a pod upwards."""

_STOP: Final = {
    "tocsin/stop": "5f0c2a9e-0000-4000-8000-000000000001",
    "tocsin/stop-reason": "nonfinite: the loss is NaN at step 200",
}
"""Of `trainings.target_job`."""


def derived(kind: Kind) -> Recording:
    """A job is looked at, suspended, looked at while it saves and when it has, and asked again."""
    base = Recording.read("suspend-job")
    running, leaving, none = (base.exchanges[i].answer for i in (0, 7, 9))
    owners = _OWNERS[kind]
    found = [_pods_of(kind, answer) for answer in (running, leaving)]
    first = found[0]["items"][0]["metadata"]
    names = {**base.scheduler.names, "pod": first["name"], "pod_uid": first["uid"]}
    names["job"] = CHILD if owners[0] == "Job" else NAME
    names["job_uid"] = _UIDS[owners[0]]
    before, asked, after = (job(kind, state) for state in ("running", "asked", "suspended"))
    path = _path(owners[-1])

    def look(answer: Object, pods: Object) -> list[Exchange]:
        label = "training.kubeflow.org/job-name" if kind == "pytorchjob" else _JOB_SET_NAME
        return [_get(path, answer), _pods(pods, labelSelector=f"{label}={NAME}")]

    selector = f"{_ALIVE},metadata.name={first['name']}"
    climb = [_get(_path(owner), _below(kind, owner)) for owner in owners[:-1]]
    body = {
        "metadata": {
            "uid": before["metadata"]["uid"],
            "resourceVersion": before["metadata"]["resourceVersion"],
            "annotations": _STOP,
        },
        "spec": {"runPolicy": {"suspend": True}} if kind == "pytorchjob" else {"suspend": True},
    }
    patch = Exchange("PATCH", path, {"fieldValidation": "Strict"}, body, 200, asked)
    return Recording(
        base.scheduler.model_copy(update={"names": names}),
        [
            _pods(found[0], fieldSelector=selector), *climb, *look(before, found[0]),
            *look(before, found[0]), patch,
            *look(after, found[1]),
            *look(after, none),
            *look(after, none),
        ],
    )  # fmt: skip


def job(kind: Kind, state: Literal["running", "asked", "suspended"]) -> Object:
    """The object of that kind. `asked`: patched, and its controller has not seen it yet."""
    off, over = state != "running", state == "suspended"
    made = {"jobset": _job_set, "trainjob": _train_job, "pytorchjob": _pytorch_job}[kind](off, over)
    made["metadata"]["resourceVersion"] = {"running": "216", "asked": "240", "suspended": "245"}[
        state
    ]
    made["metadata"]["generation"] = 2 if off else 1
    if off:
        made["metadata"]["annotations"] = _STOP
    return made


_JOB_SET_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
_ALIVE: Final = "status.phase!=Succeeded,status.phase!=Failed"


def _get(path: str, answer: Object) -> Exchange:
    return Exchange("GET", path, {}, None, 200, answer)


def _pods(answer: Object, **selectors: str) -> Exchange:
    query = {"limit": "100", "fieldSelector": _ALIVE, **selectors}
    return Exchange("GET", f"/api/v1/namespaces/{NAMESPACE}/pods", query, None, 200, answer)


def _path(owner: str) -> str:
    name = CHILD if owner == "Job" else NAME
    plural = f"{owner.lower()}s"
    return f"/apis/{_VERSIONS[owner]}/namespaces/{NAMESPACE}/{plural}/{name}"


def _reference(owner: str) -> Object:
    return {
        "apiVersion": _VERSIONS[owner],
        "blockOwnerDeletion": True,
        "controller": True,
        "kind": owner,
        "name": CHILD if owner == "Job" else NAME,
        "uid": _UIDS[owner],
    }


def _pods_of(kind: Kind, answer: Object) -> Object:
    """The recorded pod as each of two of that kind."""
    (pod,) = answer["items"]
    return {**answer, "items": [_pod(kind, pod, index) for index in range(2)]}


def _pod(kind: Kind, pod: Object, index: int) -> Object:
    made = copy.deepcopy(pod)
    meta = made["metadata"]
    meta["uid"] = f"{meta['uid'][:-1]}{index}"
    meta["ownerReferences"] = [_reference(_OWNERS[kind][0])]
    if kind == "pytorchjob":
        meta.pop("generateName", None)
        meta["name"] = f"{NAME}-worker-{index}"
        meta["labels"] = {
            "training.kubeflow.org/job-name": NAME,
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            "training.kubeflow.org/replica-index": str(index),
            "training.kubeflow.org/replica-type": "worker",
        }
        return made
    meta["generateName"] = f"{CHILD}-{index}-"
    meta["name"] = f"{meta['generateName']}2x6h{index}"
    meta["labels"] = {
        "batch.kubernetes.io/controller-uid": _UIDS["Job"],
        "batch.kubernetes.io/job-completion-index": str(index),
        "batch.kubernetes.io/job-name": CHILD,
        _JOB_SET_NAME: NAME,
        "jobset.sigs.k8s.io/job-index": "0",
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
    }
    return made


def _below(kind: Kind, owner: str) -> Object:
    """What is between the pods and the job, and who controls it."""
    above = _OWNERS[kind][_OWNERS[kind].index(owner) + 1]
    if owner == "Job":
        made = copy.deepcopy(Recording.read("suspend-job").exchanges[1].answer)
        made["metadata"] |= {"name": CHILD, "uid": _UIDS["Job"]}
    else:
        made = job("jobset", "running")
    made["metadata"]["ownerReferences"] = [_reference(above)]
    return dict(made)


def _job_set(off: bool, over: bool) -> Object:
    return {
        **_head("JobSet"),
        "spec": {
            "network": {"enableDNSHostnames": False, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": "node",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "backoffLimit": 0, "completionMode": "Indexed", "completions": 2,
                            "parallelism": 2, "template": _template("trainer"),
                        }
                    },
                }
            ],
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": []},
            "suspend": off,
        },
        "status": {
            "conditions": _conditions(over, "SuspendedJobs", "jobset is suspended"),
            "replicatedJobsStatus": [_counts(over)],
            "restarts": 0,
        },
    }  # fmt: skip


def _train_job(off: bool, over: bool) -> Object:
    return {
        **_head("TrainJob"),
        "spec": {
            "managedBy": "trainer.kubeflow.org/trainjob-controller",
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "tests",
            },
            "suspend": off,
            "trainer": {"command": ["train"], "numNodes": 2},
        },
        "status": {
            "conditions": _conditions(over, "Suspended", "TrainJob is suspended"),
            "jobsStatus": [_counts(over)],
        },
    }  # fmt: skip


def _pytorch_job(off: bool, over: bool) -> Object:
    conditions = [
        {
            "lastTransitionTime": _AT, "lastUpdateTime": _AT, "message": "", "status": status,
            "reason": f"PyTorchJob{name}", "type": name,
        }
        for name, status in (("Created", "True"), ("Running", "False" if over else "True"))
    ]  # fmt: skip
    for one in _conditions(over, "PyTorchJobSuspended", f"PyTorchJob {NAME} is suspended."):
        conditions.append({**one, "lastUpdateTime": _LATER})
    return {
        **_head("PyTorchJob"),
        "spec": {
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": 2, "restartPolicy": "Never", "template": _template("pytorch"),
                }
            },
            "runPolicy": {"suspend": off},
        },
        "status": {
            "conditions": conditions,
            "replicaStatuses": {"Worker": {} if over else {"active": 2}},
        },
    }  # fmt: skip


def _head(kind: str) -> Object:
    meta = {
        "creationTimestamp": _AT,
        "name": NAME,
        "namespace": NAMESPACE,
        "uid": _UIDS[kind],
    }
    return {"apiVersion": _VERSIONS[kind], "kind": kind, "metadata": meta}


def _template(container: str) -> Object:
    return {"spec": {"containers": [{"image": "none", "name": container}], "nodeName": "peer"}}


def _conditions(over: bool, reason: str, message: str) -> Sequence[Object]:
    suspended = {
        "lastTransitionTime": _LATER,
        "message": message,
        "reason": reason,
        "status": "True",
        "type": "Suspended",
    }
    return [suspended] if over else []


def _counts(over: bool) -> Object:
    return {
        "active": 0 if over else 1,
        "failed": 0,
        "name": "node",
        "ready": 0 if over else 1,
        "succeeded": 0,
        "suspended": 1 if over else 0,
    }
