"""The memory limit in force, from made trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tocsin.emitter.cgroups import memory_limit
from tocsin.emitter.sampler import Node

TOTAL = 64 << 30


def made(folder: Path, cgroup: str, limits: dict[str, str]) -> int:
    (folder / "proc/7").mkdir(parents=True)
    (folder / "proc/7/cgroup").write_text(cgroup)
    for path, text in limits.items():
        file = folder / "sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return memory_limit(7, TOTAL, root=folder / "sys", proc=folder / "proc")


def test_the_lowest_limit_above_holds(tmp_path: Path) -> None:
    limits = {"a/b/memory.max": "max", "a/memory.max": str(8 << 30)}
    assert made(tmp_path, "0::/a/b\n", limits) == 8 << 30


def test_in_a_container_the_root_is_its_own_group(tmp_path: Path) -> None:
    limits = {"memory.max": str(4 << 30)}
    assert made(tmp_path, "0::/kubepods/pod1/c1\n", limits) == 4 << 30


def test_version_1(tmp_path: Path) -> None:
    cgroup = "5:cpu:/a\n4:memory:/a\n1:name=systemd:/a\n"
    assert made(tmp_path, cgroup, {"memory/a/memory.limit_in_bytes": str(2 << 30)}) == 2 << 30


def test_no_limit_is_the_machine_s_memory(tmp_path: Path) -> None:
    limits = {"memory/a/memory.limit_in_bytes": "9223372036854771712"}
    assert made(tmp_path, "4:memory:/a\n", limits) == TOTAL


def test_odd_files_limit_nothing(tmp_path: Path) -> None:
    assert made(tmp_path, "odd\n0::../x\n0::/a\n", {"a/memory.max": "?"}) == TOTAL
    assert memory_limit(8, TOTAL, root=tmp_path, proc=tmp_path) == TOTAL


def test_it_is_among_the_samples_of_this_node() -> None:
    sample = Node(root_pid=os.getpid()).sample(1.0)
    assert 0 < sample["memory.limit_bytes"] <= psutil.virtual_memory().total
