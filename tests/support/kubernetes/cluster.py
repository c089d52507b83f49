"""A Kubernetes on loopback: etcd, API server, controllers, and a kubelet that starts processes."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from support.kubernetes.build import CRDS, Programs
from support.servers.kafka_broker import free_ports
from support.waiting import SOON_S, wait_until

Object = dict[str, Any]
"""An object of the API, as it is written."""

NODE: Final = "peer"
"""The node that `Kubelet` stands for. There is no scheduler: pods name it."""

_STOP_S: Final = 10.0


@dataclass
class Cluster:
    """A running one. `call` is done as its administrator."""

    folder: Path
    programs: Programs
    port: int
    token: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def authority(self) -> Path:
        """The PEM file that vouches for the API server."""
        return self.folder / "certs" / "apiserver.crt"

    def call(
        self, method: str, path: str, body: Object | None = None, *, token: str | None = None
    ) -> tuple[int, Object]:
        """The status and the object of an answer."""
        patch = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {token or self.token}", "content-type": patch},
        )
        tls = ssl.create_default_context(cafile=str(self.authority))
        try:
            with urllib.request.urlopen(request, context=tls, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def get(self, path: str) -> Object:
        """An object that must be there."""
        status, found = self.call("GET", path)
        assert status == 200, (path, status, found)
        return found

    def create(self, path: str, body: Object) -> Object:
        """A new object."""
        status, made = self.call("POST", path, body)
        assert status == 201, (path, status, made)
        return made

    def apply(self, manifests: Path) -> None:
        """Create what a file of manifests holds, as `kubectl apply` would."""
        for each in yaml.safe_load_all(manifests.read_text()):
            namespace = each["metadata"].get("namespace")
            group = each["apiVersion"]
            root = f"/api/{group}" if "/" not in group else f"/apis/{group}"
            scope = f"/namespaces/{namespace}" if namespace else ""
            self.create(f"{root}{scope}/{each['kind'].lower()}s", each)

    def account_token(self, namespace: str, account: str) -> str:
        """A token of a service account, as `kubectl create token` gives it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.create(path, {"spec": {}})["status"]["token"])

    def kubeconfig(self, name: str, token: str) -> Path:
        """A kubeconfig that logs in with a token."""
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    def start(self, name: str, *command: str, **environ: str) -> None:
        """Start one of its processes."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        """Kill one: its state is in etcd, or thrown away with it."""
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait(_STOP_S)

    def stop_all(self) -> None:
        """The last one to be started is the first one to be stopped."""
        for name in reversed([*self.processes]):
            self.stop(name)

    def start_apiserver(self) -> None:
        """Start the API server, for the first time or again, and wait until it is ready."""
        folder = self.folder
        self.start(
            "apiserver",
            str(self.programs.apiserver),
            f"--etcd-servers=http://127.0.0.1:{(folder / 'etcd.port').read_text()}",
            "--bind-address=127.0.0.1",
            # Where there is no route to the world it would find no address of its own. Nothing
            # listens there.
            "--advertise-address=192.0.2.1",
            f"--secure-port={self.port}",
            f"--cert-dir={folder / 'certs'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'accounts.key'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        wait_until(lambda: self._answers("/readyz"), what="the API server is ready")

    def _answers(self, path: str) -> bool:
        process = self.processes["apiserver"]
        if process.poll() is not None:
            log = (self.folder / "apiserver.log").read_text(errors="replace")
            raise RuntimeError(f"the API server ended:\n{log[-3000:]}")
        tls = ssl.create_default_context()
        try:
            tls.load_verify_locations(str(self.authority))
            request = urllib.request.Request(
                self.url + path, headers={"authorization": f"Bearer {self.token}"}
            )
            with urllib.request.urlopen(request, context=tls, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def add_kinds(self, *plurals: str) -> None:
        """Make kinds known to the API server, from the descriptions in their modules."""
        root = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for plural in plurals:
            made = self.create(root, yaml.safe_load(self.programs.crd(plural).read_text()))
            path = f"{root}/{made['metadata']['name']}"

            def served(path: str = path) -> bool:
                conditions = self.get(path).get("status", {}).get("conditions") or []
                return ("Established", "True") in [(c["type"], c["status"]) for c in conditions]

            wait_until(served, SOON_S, f"{plural} are served")

    def start_operators(self) -> None:
        """The controllers of JobSets, TrainJobs and PyTorchJobs, with their kinds."""
        self.add_kinds(*CRDS)
        config = str(self.kubeconfig("admin", self.token))
        for name, program in (
            ("trainer", self.programs.trainer),
            ("pytorch", self.programs.pytorch),
        ):
            self.start(name, str(program), KUBECONFIG=config)


@contextmanager
def kubernetes_cluster(folder: Path, programs: Programs) -> Iterator[Cluster]:
    """Start one with an empty store in an empty folder."""
    etcd, peer, api, manager = free_ports(4)
    (folder / "certs").mkdir()
    (folder / "etcd.port").write_text(str(etcd))
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f"{token},admin,1,system:masters\n")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "accounts.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    cluster = Cluster(folder, programs, api, token)
    with ExitStack() as stack:
        stack.callback(cluster.stop_all)
        cluster.start(
            "etcd",
            str(programs.etcd),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        cluster.start_apiserver()
        cluster.start(
            "manager",
            str(programs.manager),
            f"--kubeconfig={cluster.kubeconfig('admin', token)}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={manager}",
            f"--cert-dir={folder / 'certs'}",
            f"--service-account-private-key-file={folder / 'accounts.key'}",
            "--controllers=job-controller,garbage-collector-controller,namespace-controller,"
            "serviceaccount-controller",
        )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until(lambda: cluster.call("GET", account)[0] == 200, what="the controllers work")
        yield cluster


class Kubelet:
    """Runs the pods of `NODE`: the command of a pod's first container is a process here.

    It does what a kubelet does, in `step`s: starts, reports, and for a pod that is being deleted
    sends SIGTERM, then SIGKILL when its grace is over, and removes it when the process is gone.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        self._told: dict[str, float] = {}

    def step(self) -> None:
        """One round over all pods."""
        for pod in self._cluster.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}")["items"]:
            self._pod(pod)

    def process(self, pod_uid: str) -> subprocess.Popen[bytes]:
        """The process of a pod."""
        return self._running[pod_uid][0]

    def close(self) -> None:
        """Kill all processes."""
        for process, _ in self._running.values():
            process.kill()
            process.wait(_STOP_S)

    def _pod(self, pod: Object) -> None:
        meta, uid = pod["metadata"], pod["metadata"]["uid"]
        leaving = "deletionTimestamp" in meta
        if uid not in self._running:
            if leaving:
                self._remove(meta)
            elif pod["status"].get("phase") == "Pending":
                self._start(pod)
            return
        process, started = self._running[uid]
        if leaving and uid not in self._told:
            self._told[uid] = time.monotonic()
            process.terminate()
        if leaving and time.monotonic() - self._told[uid] > meta["deletionGracePeriodSeconds"]:
            process.kill()
        code = process.poll()
        if code is None:
            return
        if pod["status"].get("phase") == "Running":
            code = code if code >= 0 else 128 - code
            state = {"terminated": {"exitCode": code, "startedAt": started}}
            self._report(pod, "Failed" if code else "Succeeded", state)
        if leaving:
            self._remove(meta)

    def _start(self, pod: Object) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        given = {one["name"]: _value(one, pod) for one in container.get("env", [])}
        with (self._cluster.folder / f"{meta['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                [*container.get("command", []), *container.get("args", [])],
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._running[meta["uid"]] = process, started
        self._report(pod, "Running", {"running": {"startedAt": started}})

    def _report(self, pod: Object, phase: str, state: Object) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        ready = phase == "Running"
        status = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": "none",
                    "imageID": "",
                    "restartCount": 0,
                    "ready": ready,
                    "state": state,
                }
            ],
        }
        self._cluster.call(
            "PATCH", f"{_path(meta)}/status", {"metadata": {"uid": meta["uid"]}, "status": status}
        )

    def _remove(self, meta: Object) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        self._cluster.call("DELETE", _path(meta), options)


def _path(meta: Object) -> str:
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def _value(variable: Mapping[str, Any], pod: Object) -> str:
    """The value of a variable of a container: as written, or a field by the downward API."""
    source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if source is None:
        return str(variable.get("value", ""))
    path, _, key = source.partition("[")
    found: Any = pod
    for name in path.split("."):
        found = found.get(name, {})
    return str(found.get(key.strip("']"), "")) if key else str(found)


def pod_template(command: Sequence[str], env: Sequence[Object], grace_s: int = 5) -> Object:
    """A pod on `NODE` that runs a command here."""
    return {
        "spec": {
            "nodeName": NODE,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace_s,
            "automountServiceAccountToken": False,
            "containers": [
                {"name": "trainer", "image": "none", "command": [*command], "env": [*env]}
            ],
        }
    }
