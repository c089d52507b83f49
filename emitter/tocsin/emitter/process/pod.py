"""The pod of Kubernetes that a process runs in, as it can be seen from within.

A pod knows little of itself unless its specification passes it on, through variables that the
downward API fills. What is left is read where the kubelet left it: it mounts files of its own into
each container, from folders that are named after the pod and the container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.runs import SchedulerJob

NAMESPACE: Final = "TOCSIN_POD_NAMESPACE"
POD: Final = "TOCSIN_POD_NAME"
POD_UID: Final = "TOCSIN_POD_UID"
JOB: Final = "TOCSIN_JOB_NAME"
JOB_UID: Final = "TOCSIN_JOB_UID"

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_HOSTS_FILE: Final = Path("/etc/hosts")
_OF_THE_NODE: Final = "# Kubernetes-managed hosts file (host network)."
"""How the kubelet begins the file of a pod with `hostNetwork: true`."""

_LONGEST: Final = 253
"""Characters of a name in Kubernetes."""

_UID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_HOSTS: Final = re.compile(rf"\S*/pods/(?P<uid>{_UID})/etc-hosts")
_LOG: Final = re.compile(rf"\S*/pods/(?P<uid>{_UID})/containers/(?P<container>[^/\s]+)/[0-9a-f]+")


def pod_name(environ: Mapping[str, str], *, hosts: Path = _HOSTS_FILE) -> str:
    """The name of this process's pod; "" where it is not known.

    With host networking the host name is the node's, which unrelated jobs have in common.
    """
    name = environ.get(POD)
    if name:
        return name
    return "" if _text(hosts).startswith(_OF_THE_NODE) else environ.get("HOSTNAME", "")


def kubernetes(
    environ: Mapping[str, str],
    *,
    account: Path = _ACCOUNT,
    mounts: Path = _MOUNTS,
    now_ms: int | None = None,
) -> SchedulerJob | None:
    """The pod of this process; None outside of Kubernetes. Reads two small files.

    `noted_ms` is the time by the node's clock: a container that was started after it runs another
    incarnation, in the same pod.
    """
    if not environ.get("KUBERNETES_SERVICE_HOST") and not environ.get(POD_UID):
        return None
    noted = unix_ms() if now_ms is None else now_ms
    names = {
        "namespace": environ.get(NAMESPACE) or _text(account).strip(),
        "pod": environ.get(POD, ""),
        "host": environ.get("HOSTNAME", ""),
        "job": environ.get(JOB, ""),
        "job_uid": environ.get(JOB_UID, ""),
        **_mounted(_text(mounts)),
        "noted_ms": str(noted),
    }
    if environ.get(POD_UID):
        names["pod_uid"] = environ[POD_UID]
    return SchedulerJob(
        kind="kubernetes",
        names={name: value for name, value in names.items() if _usable(value)},
    )


def _usable(name: str) -> bool:
    """Whether it can be a name or an id in Kubernetes."""
    return 0 < len(name) <= _LONGEST and name.isascii() and name.isprintable()


def _mounted(mountinfo: str) -> dict[str, str]:
    """The pod's uid and the container's name, from the mounts that the kubelet has made."""
    found: dict[str, str] = {}
    for line in mountinfo.splitlines():
        # id, parent, device, root within its file system, mount point, …
        fields = line.split(" ", 5)
        if len(fields) < 6:
            continue
        root, point = fields[3], fields[4]
        match = _HOSTS.fullmatch(root) if point == "/etc/hosts" else _LOG.fullmatch(root)
        if match is None:
            continue
        found.setdefault("pod_uid", match["uid"])
        if "container" in match.groupdict():
            found["container"] = match["container"]
    return found


def _text(path: Path) -> str:
    """What a file holds; "" if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1024 * 1024)
    except OSError:
        return ""
