"""The job's processes: made trees of /proc, and real children of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import wait_until
from tocsin.emitter.node.process_tree import WALK_EVERY_S, ProcessTree

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Made:
    """A made /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.children: dict[int, list[int]] = {}

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        name: str = "python",
        command: str = "/usr/bin/python3\0train.py\0",
        ticks: int = 0,
        pages: int = 10,
        started: int = 5,
        threads: tuple[int, ...] = (),
    ) -> None:
        folder = self.root / f"proc/{pid}"
        (folder / f"task/{pid}").mkdir(parents=True, exist_ok=True)
        before, after = f"{pid} ({name}) S {parent} 0 0 0 0 0 0 0 0 0", f"{started} 1 {pages} 0"
        line = before + " {} 0 0 0 20 0 1 0 " + after
        (folder / "stat").write_text(line.format(ticks))
        (folder / "cmdline").write_text(command)
        for n, own in enumerate(threads or (ticks,)):
            (folder / f"task/{pid + n}").mkdir(exist_ok=True)
            (folder / f"task/{pid + n}/stat").write_text(line.format(own))
        below = self.children.setdefault(parent, [])
        if pid not in below:
            below.append(pid)
        for known, pids in self.children.items():
            if (self.root / f"proc/{known}/task/{known}").is_dir():
                text = " ".join(map(str, pids))
                (self.root / f"proc/{known}/task/{known}/children").write_text(text)

    def gone(self, pid: int) -> None:
        file = self.root / f"proc/{pid}/stat"
        file.write_text(file.read_text().replace(") S ", ") Z "))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def tree_of(made: Made, *roots: int) -> ProcessTree:
    tree = ProcessTree(made.root)
    tree.roots = frozenset(roots)
    return tree


def test_cpu_and_memory_of_all_below_the_job(made: Made) -> None:
    made.process(10, name="a) name (of its own")
    made.process(11, parent=10)
    made.process(12, parent=11)
    made.process(99)
    tree = tree_of(made, 10)
    first = tree.read(0.0)
    assert tree.pids == {10, 11, 12}
    assert first["memory.process_tree_bytes"] == 30 * PAGE
    assert "cpu.process_tree_percent" not in first
    made.process(12, parent=11, ticks=TICKS // 2)
    made.gone(11)
    # What the job has begun is the job's, whoever has ended since.
    found = tree.read(1.0)
    assert found["cpu.process_tree_percent"] == 50
    assert found["memory.process_tree_bytes"] == 20 * PAGE
    tree.roots = frozenset({99})
    tree.read(2.0)
    assert tree.pids == {99}


def test_a_process_that_is_new_counts_from_now_on(made: Made) -> None:
    made.process(10)
    tree = tree_of(made, 10)
    tree.read(0.0)
    made.process(11, parent=10, ticks=50 * TICKS)
    later = WALK_EVERY_S + 1
    assert tree.read(later)["cpu.process_tree_percent"] == 0
    assert tree.pids == {10, 11}
    made.process(11, parent=10, ticks=51 * TICKS)
    assert tree.read(later + 2)["cpu.process_tree_percent"] == 50


def test_a_number_that_is_another_process_s_now_is_not_the_job_s(made: Made) -> None:
    made.process(10)
    made.process(11, parent=10)
    tree = tree_of(made, 10)
    tree.read(0.0)
    made.process(11, started=6)
    made.children[10].clear()
    tree.read(1.0)
    assert tree.pids == {10}


def test_a_job_that_has_ended_has_no_columns(made: Made) -> None:
    made.process(10)
    tree = tree_of(made, 10)
    assert tree.read(0.0)
    made.gone(10)
    assert tree.read(1.0) == {}
    assert tree_of(made).read(0.0) == {}


def test_the_busiest_thread_is_a_core_s_worth(made: Made) -> None:
    made.process(10, threads=(0, 0))
    tree = tree_of(made, 10)
    tree.read(0.0)
    elapsed_s = 2 * WALK_EVERY_S
    made.process(10, ticks=11 * TICKS, threads=(TICKS, 10 * TICKS))
    found = tree.read(elapsed_s)
    assert found["cpu.process_tree_busiest_core_percent"] == 100
    made.process(10, ticks=12 * TICKS, threads=(2 * TICKS, 12 * TICKS))
    assert tree.read(2 * elapsed_s)["cpu.process_tree_busiest_core_percent"] == 20


def test_workers_that_pytorch_has_named(made: Made) -> None:
    made.process(10)
    made.process(11, parent=10, name="pt_data_worker", pages=3)
    made.process(12, parent=10, name="pt_data_worker", pages=4)
    made.process(13, parent=10)  # forked for something else
    tree = tree_of(made, 10)
    first = tree.read(0.0)
    assert first["data_loader.workers"] == 2
    assert first["data_loader.memory_bytes"] == 7 * PAGE
    made.process(11, parent=10, name="pt_data_worker", ticks=TICKS)
    assert tree.read(2.0)["data_loader.cpu_percent"] == 50


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        ("/usr/bin/python3\0train.py\0", 1),  # forked
        ("python\0-c\0from multiprocessing.spawn import spawn_main\0--multiprocessing-fork\0", 1),
        ("python\0-c\0from multiprocessing.resource_tracker import main;main(5)\0", 0),
        ("nvidia-smi\0", 0),
        ("", 0),
    ],
)
def test_workers_that_nobody_has_named(made: Made, command: str, workers: int) -> None:
    made.process(9, command="bash\0train.sh\0")
    made.process(10, parent=9)
    made.process(11, parent=10, command=command)
    assert tree_of(made, 9).read(0.0)["data_loader.workers"] == workers


def test_a_shell_that_forks_has_no_workers(made: Made) -> None:
    made.process(9, command="bash\0train.sh\0")
    made.process(10, parent=9, command="bash\0train.sh\0")
    assert tree_of(made, 9).read(0.0)["data_loader.workers"] == 0


def test_real_processes() -> None:
    code = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", code]) as child:
        tree = ProcessTree()
        tree.roots = frozenset({child.pid})
        now_s = 0.0

        def is_whole() -> bool:
            nonlocal now_s
            now_s += 100
            tree.read(now_s)
            return len(tree.pids) == 2

        wait_until(is_whole)
        (below,) = tree.pids - {child.pid}
        os.kill(below, 9)
        child.wait()
    assert tree.read(now_s + 100) == {}
