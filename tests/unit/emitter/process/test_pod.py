"""What a process in a pod of Kubernetes records of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.emitter.process.pod import kubernetes, pod_name
from tocsin.schemas.records.runs import SchedulerJob

UID = "6f0c2a9e-1b2c-4d3e-8f90-a1b2c3d4e5f6"
JOB_UID = "0b1c2d3e-4f50-4617-8293-a4b5c6d7e8f9"

# As the kubelet mounts them, here with its folder on a file system of its own.
MOUNTS = f"""\
812 790 0:57 / / rw,relatime - overlay overlay rw
830 812 8:1 /lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
831 812 8:1 /lib/kubelet/pods/{UID}/containers/trainer/1f2e3d4c /dev/termination-log rw - ext4 /dev/sda1 rw
832 812 8:1 /lib/kubelet/pods/{UID}/volumes/data /data rw,relatime - ext4 /dev/sda1 rw
"""  # noqa: E501
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "gpt-1-x7k2p"}


def recorded(folder: Path, environ: dict[str, str], mounts: str = MOUNTS) -> SchedulerJob | None:
    (folder / "mountinfo").write_text(mounts)
    (folder / "namespace").write_text("train\n")
    return kubernetes(
        environ, account=folder / "namespace", mounts=folder / "mountinfo", now_ms=1_795_000_000_000
    )


def test_outside_of_kubernetes_there_is_none(tmp_path: Path) -> None:
    assert recorded(tmp_path, {"HOSTNAME": "node-17"}) is None


def test_without_the_downward_api_the_kubelets_mounts_tell_the_pod(tmp_path: Path) -> None:
    assert recorded(tmp_path, IN_A_POD) == SchedulerJob(
        kind="kubernetes",
        names={
            "namespace": "train",
            "host": "gpt-1-x7k2p",
            "pod_uid": UID,
            "container": "trainer",
            "noted_ms": "1795000000000",
        },
    )


def test_the_downward_api_tells_the_job_and_counts_more(tmp_path: Path) -> None:
    told = {
        "TOCSIN_POD_NAMESPACE": "other",
        "TOCSIN_POD_NAME": "gpt-1-x7k2p",
        "TOCSIN_POD_UID": UID.replace("6f", "7f"),
        "TOCSIN_JOB_NAME": "gpt-1",
        "TOCSIN_JOB_UID": JOB_UID,
    }
    found = recorded(tmp_path, IN_A_POD | told)
    assert found is not None
    assert found.names == {
        "namespace": "other",
        "pod": "gpt-1-x7k2p",
        "host": "gpt-1-x7k2p",
        "pod_uid": UID.replace("6f", "7f"),
        "container": "trainer",
        "job": "gpt-1",
        "job_uid": JOB_UID,
        "noted_ms": "1795000000000",
    }


@pytest.mark.parametrize(
    "mounts",
    [
        "",
        "no mounts at all\n",
        # A path that only resembles it, and one that is mounted elsewhere.
        "830 812 8:1 /pods/not-a-uid/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n",
        f"830 812 8:1 /pods/{UID}/etc-hosts /mnt/hosts rw - ext4 /dev/sda1 rw\n",
    ],
)
def test_other_mounts_tell_nothing(tmp_path: Path, mounts: str) -> None:
    found = recorded(tmp_path, IN_A_POD, mounts)
    assert found is not None
    assert set(found.names) == {"namespace", "host", "noted_ms"}


def test_files_that_are_missing_are_no_fault(tmp_path: Path) -> None:
    found = kubernetes(IN_A_POD, account=tmp_path / "a", mounts=tmp_path / "b", now_ms=1)
    assert found == SchedulerJob(kind="kubernetes", names={"host": "gpt-1-x7k2p", "noted_ms": "1"})


@pytest.mark.parametrize("name", ["x" * 300, "a\udc80", "a\nb"])
def test_a_name_that_is_none_in_kubernetes_is_left_out(tmp_path: Path, name: str) -> None:
    found = recorded(tmp_path, IN_A_POD | {"TOCSIN_JOB_NAME": name})
    assert found is not None
    assert "job" not in found.names


@pytest.mark.parametrize(
    ("hosts", "environ", "name"),
    [
        ("# Kubernetes-managed hosts file.\n127.0.0.1 localhost\n", {}, "gpt-1-x7k2p"),
        ("", {}, "gpt-1-x7k2p"),
        # The host name is the node's then.
        ("# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n", {}, ""),
        (
            "# Kubernetes-managed hosts file (host network).\n",
            {"HOSTNAME": "k8s-worker-3", "TOCSIN_POD_NAME": "gpt-1-x7k2p"},
            "gpt-1-x7k2p",
        ),
    ],
)
def test_the_name_of_a_node_is_not_that_of_a_pod(
    tmp_path: Path, hosts: str, environ: dict[str, str], name: str
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    assert pod_name({**IN_A_POD, **environ}, hosts=tmp_path / "hosts") == name
