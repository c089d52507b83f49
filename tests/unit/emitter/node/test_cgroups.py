"""The limits in force, from made trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tocsin.emitter.node.cgroups import GroupSamples, read_limits
from tocsin.emitter.node.sampler import Node

TOTAL = 64 << 30


def made(root: Path, cgroup: str, files: dict[str, str], status: str = "") -> Path:
    (root / "proc/7").mkdir(parents=True)
    (root / "proc/7/cgroup").write_text(cgroup)
    (root / "proc/7/status").write_text(status)
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def limit(root: Path, cgroup: str, files: dict[str, str]) -> int:
    found = read_limits(7, root=made(root, cgroup, files)).memory_bytes
    return TOTAL if found is None else min(found, TOTAL)


def test_the_lowest_limit_above_holds(tmp_path: Path) -> None:
    limits = {"a/b/memory.max": "max", "a/memory.max": str(8 << 30)}
    assert limit(tmp_path, "0::/a/b\n", limits) == 8 << 30


def test_in_a_container_the_root_is_its_own_group(tmp_path: Path) -> None:
    limits = {"memory.max": str(4 << 30)}
    assert limit(tmp_path, "0::/kubepods/pod1/c1\n", limits) == 4 << 30


def test_version_1(tmp_path: Path) -> None:
    cgroup = "5:cpu:/a\n4:memory:/a\n1:name=systemd:/a\n"
    assert limit(tmp_path, cgroup, {"memory/a/memory.limit_in_bytes": str(2 << 30)}) == 2 << 30


def test_no_limit_is_the_machine_s_memory(tmp_path: Path) -> None:
    limits = {"memory/a/memory.limit_in_bytes": "9223372036854771712"}
    assert limit(tmp_path, "4:memory:/a\n", limits) == TOTAL


def test_odd_files_limit_nothing(tmp_path: Path) -> None:
    assert limit(tmp_path, "odd\n0::../x\n0::/../x\n0::/a\n", {"a/memory.max": "?"}) == TOTAL
    assert read_limits(8, root=tmp_path).memory_bytes is None


@pytest.mark.parametrize(
    ("files", "status", "cores"),
    [
        ({"a/cpu.max": "max 100000", "cpu.max": "250000 100000"}, "", 2.5),
        ({"a/cpu.max": "max 100000"}, "Cpus_allowed_list:\t0-3,8\n", 5),
        ({"a/cpu.max": "150000 100000"}, "Cpus_allowed_list:\t0-3\n", 1.5),
        ({"a/cpu.max": "odd"}, "Cpus_allowed_list:\todd\n", None),
        ({"a/cpu.max": "100 0"}, "", None),
    ],
)
def test_the_cores_that_the_job_may_use(
    tmp_path: Path, files: dict[str, str], status: str, cores: float | None
) -> None:
    assert read_limits(7, root=made(tmp_path, "0::/a\n", files, status)).cores == cores


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}
    root = made(tmp_path, "3:cpu,cpuacct:/a\n", files)
    assert read_limits(7, root=root).cores == 0.5
    (tmp_path / "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us").write_text("-1\n")
    assert read_limits(7, root=root).cores is None


def test_columns_of_a_limited_group(tmp_path: Path) -> None:
    files = {
        "a/memory.max": str(8 << 30),
        "a/memory.current": str(5 << 30),
        "a/memory.stat": f"anon 1\ninactive_file {2 << 30}\nodd",
        "a/b/cpu.stat": "usage_usec 5\nthrottled_usec 1000000",
    }
    group = GroupSamples(made(tmp_path, "0::/a/b\n", files))
    group.pid, group.total = 7, TOTAL
    assert group.read(1.0) == {
        "memory.limit_bytes": 8 << 30,
        "memory.group_used_bytes": 3 << 30,
    }
    (tmp_path / "sys/fs/cgroup/a/b/cpu.stat").write_text("throttled_usec 1250000\n")
    assert group.read(2.0)["cpu.throttled_percent"] == 25


def test_version_1_counts_throttling_in_nanoseconds(tmp_path: Path) -> None:
    file = "cpu/a/cpu.stat"
    group = GroupSamples(made(tmp_path, "3:cpu:/a\n", {file: "throttled_time 0"}))
    group.pid, group.total = 7, TOTAL
    assert group.read(1.0) == {"memory.limit_bytes": TOTAL}
    (tmp_path / "sys/fs/cgroup" / file).write_text("throttled_time 500000000\n")
    assert group.read(2.0)["cpu.throttled_percent"] == 50


def test_it_is_among_the_samples_of_this_node() -> None:
    sample = Node(root_pid=os.getpid()).sample(1.0)
    assert 0 < sample["memory.limit_bytes"] <= psutil.virtual_memory().total
    assert 0 < sample["cpu.limit_cores"] <= (os.cpu_count() or 1)
