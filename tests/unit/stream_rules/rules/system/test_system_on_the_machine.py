"""Rules on what this machine really does: memory that fills, a full disk, a core that is busy."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.records.node_samples import gpu
from support.records.traces import Line, add_trace
from tocsin.emitter.node import process_tree
from tocsin.emitter.node.sampler import Node
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import RunBuilder, issues_of, only

MIB = 1 << 20
EATS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(2 << 20))
    print(len(kept), flush=True)
"""
SPINS = "print(flush=True)\nwhile True: pass"
SLEEPS = "import time\nprint(flush=True)\ntime.sleep(60)"


def run_of_trace(lines: list[Line]) -> RunBuilder:
    run = RunBuilder()
    run.started()
    run.steps([0], loss=1.0)
    add_trace(run, lines)
    return run


def firing(lines: list[Line], specs: tuple[RuleSpec, ...]) -> list[tuple[str, str]]:
    issues = issues_of(run_of_trace(lines).records, specs=specs)
    return [(issue.branch, issue.severity) for issue in issues if issue.state == "firing"]


# -- memory


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group below this process's own; skips the test where that may not be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of_memory = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    unified = next((path for number, names, path in lines if number == "0" and not names), "/")
    root = Path("/sys/fs/cgroup")
    above, name = (
        (root / unified.lstrip("/"), "memory.max")
        if of_memory is None
        else (root / "memory" / of_memory.lstrip("/"), "memory.limit_in_bytes")
    )
    group = above / f"tocsin-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit of memory can be set here: {error}")
        yield group
    finally:
        for _ in range(200):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


def eaten(
    child: subprocess.Popen[str], folder: Path, *, limit: int | None = None, most: int = 400
) -> list[Line]:
    """Samples of a child that takes 2 MiB between two of them, until it breaks. Each is taken for
    three seconds after the one before."""
    node = Node(root_pid=child.pid, folder=folder)
    assert child.stdin is not None
    assert child.stdout is not None
    lines: list[Line] = []
    for at_s in itertools.count(0.0, 3.0):
        sample = node.sample(at_s)
        if "memory.process_tree_bytes" in sample:
            if limit is not None:
                sample["memory.limit_bytes"] = float(limit)
            lines.append((at_s, {k: v for k, v in sample.items() if k.startswith("memory.")}))
        try:
            child.stdin.write("more\n")
            child.stdin.flush()
        except BrokenPipeError:
            break
        if not child.stdout.readline() or len(lines) >= most:
            break
    node.close()
    node.machine.close()
    return lines


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_a_process_that_eats_the_memory_of_its_group(tmp_path: Path) -> None:
    with memory_group(300 * MIB) as group, child(EATS) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        lines = eaten(process, tmp_path)
        assert lines[-1][1]["memory.limit_bytes"] == 300 * MIB
        # The kernel has killed it; the rule said so before.
        assert process.wait(10) == -9
    ((branch, severity),) = firing(lines, only("host_memory_increase"))
    assert branch in ("steady", "fast")
    assert severity == "warning"


def test_a_process_that_eats_what_its_own_limit_allows(tmp_path: Path) -> None:
    with child(EATS) as process:
        limit = 400 * MIB
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        lines = eaten(process, tmp_path, limit=limit)
        assert process.wait(10) == 1  # MemoryError
    ((branch, severity),) = firing(lines, only("host_memory_increase"))
    assert branch in ("steady", "fast")
    assert severity == "warning"


# -- disk


def test_a_file_system_that_really_is_full(tmp_path: Path) -> None:
    there = tmp_path / "full"
    there.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(there)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        node = Node(folder=there)
        lines = [(10.0 * n, _disk_of(node, 10.0 * n)) for n in range(3)]
        assert firing(lines, only("disk_full")) == []
        with pytest.raises(OSError, match="No space left"):
            (there / "file").write_bytes(bytes(8 * MIB))
        lines += [(10.0 * n, _disk_of(node, 10.0 * n)) for n in range(3, 12)]
        node.close()
        node.machine.close()
    finally:
        subprocess.run(["umount", str(there)], check=True)
    assert firing(lines, only("disk_full")) == [("full", "critical")]


_SPACE = ("disk.free_bytes", "disk.total_bytes")


def _disk_of(node: Node, at_s: float) -> dict[str, float]:
    """Sampled until the thread that looks at disks has answered."""
    found: dict[str, float] = {}
    for _ in range(100):
        found = {
            k: v for k, v in node.sample(at_s).items() if k.endswith(("free_bytes", "total_bytes"))
        }
        if "disk.free_bytes" in found:
            break
        time.sleep(0.01)
    return {name: value for name, value in found.items() if name.startswith("disk.")}


# -- processors


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are looked at with each sample."""
    monkeypatch.setattr(process_tree, "WALK_EVERY_S", 0.0)


def busy(code: str, folder: Path, samples: int = 12) -> list[Line]:
    """Samples of a job whose child runs that code on one core, beside a GPU that waits. Its start,
    which takes that core, too, is over before."""
    idle_gpu = {name: float(value) for name, value in gpu(2.0).items()}  # type: ignore[arg-type]
    with child(code) as process:
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        assert process.stdout is not None
        process.stdout.readline()
        node = Node(root_pid=process.pid, folder=folder)
        lines: list[Line] = []
        began = time.monotonic()
        try:
            for n in range(samples):
                time.sleep(max(0.0, began + 0.15 * n - time.monotonic()))
                now = time.monotonic()
                own = {k: v for k, v in node.sample(now).items() if "process_tree" in k}
                if n > 1:
                    lines.append((now - began, {**own, "cpu.limit_cores": 1.0, **idle_gpu}))
        finally:
            process.kill()
            node.close()
            node.machine.close()
    return lines


@pytest.mark.usefixtures("look_often")
def test_a_child_that_spins_on_its_core(tmp_path: Path) -> None:
    # What other programs leave of that core is all that the child can take; one that sleeps takes
    # none.
    specs = only("cpu_bottleneck", patience=10, cpu_threshold=5.0)
    assert firing(busy(SPINS, tmp_path), specs) == [("", "warning")]
    assert firing(busy(SLEEPS, tmp_path), specs) == []
