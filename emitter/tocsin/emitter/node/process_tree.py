"""The processes of the job: their CPU and memory, the busiest core, the data loader's workers.

Columns: `cpu.process_tree_percent` (100 is one core), `memory.process_tree_bytes` (resident, shared
pages counted in each), `cpu.process_tree_busiest_core_percent`: the CPU share of the busiest
thread (a thread is on one core at a time: so much of one core is taken by what cannot be spread
over others); `data_loader.workers`, `data_loader.cpu_percent`, `data_loader.memory_bytes`.

Which processes are workers: those that PyTorch has named so. Where none is named (PyTorch before
2.6), those that Python's multiprocessing made and that made none themselves: forked from a python,
or told so on their command line. A rank that was itself forked counts as one, then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Paced, Sample

WALK_EVERY_S: Final = 5.0
"""Walking the tree costs as much as all other readings, seconds."""

MAX_OPEN: Final = 256
"""Processes whose file is kept open."""

BUSIEST: Final = 8
"""Of so many processes, those with the most CPU time, the threads are looked at."""

MAX_THREADS: Final = 256
"""Threads of one process that are looked at."""

WORKER: Final = b"pt_data_worker"

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MADE = (b"multiprocessing.spawn", b"multiprocessing.forkserver", b"--multiprocessing-fork")


class _Process:
    """One process as of its last reading."""

    __slots__ = ("_file", "command", "name", "parent", "pid", "resident", "started", "ticks")

    def __init__(self, root: Path, pid: int, *, keep: bool) -> None:
        self.pid = pid
        self._file = ProcFile(root / f"proc/{pid}/stat", size=1024, keep=keep)
        self.name = b""
        self.command = b""
        self.parent = self.started = self.ticks = self.resident = -1

    def read(self) -> bool:
        """False once it has ended, or if its number is another process's now."""
        text = self._file.read()
        if text is None:
            return False
        # The name is the program's own choice: it may hold blanks and parentheses.
        end = text.rindex(b")")
        words = text[end + 2 :].split(None, 22)
        started = int(words[19])
        if words[0] == b"Z" or self.started not in (-1, started):
            return False
        self.name = text[text.index(b"(") + 1 : end]
        self.started = started
        self.parent = int(words[1])
        self.ticks = int(words[11]) + int(words[12])
        self.resident = int(words[21]) * _PAGE_BYTES
        return True

    def close(self) -> None:
        self._file.close()


class ProcessTree:
    """The processes below those of `roots`, which are the job's; they may change at any time."""

    def __init__(self, root: Path = ROOT) -> None:
        self.roots: frozenset[int] = frozenset()
        self._root = root
        self._processes: dict[int, _Process] = {}
        self._walked: frozenset[int] | None = None
        self._keep_orphans = False
        self._walking = Paced("the job's processes", self._walk, least_s=WALK_EVERY_S)
        self._sampling_threads = Paced("the job's threads", self._threads, least_s=WALK_EVERY_S)
        self._before: dict[int, int] = {}
        self._at_s = 0.0
        self._threads_before: dict[tuple[int, int], int] = {}
        self._threads_at_s = 0.0
        self._ticks_at_sampling: dict[int, int] = {}

    @property
    def pids(self) -> frozenset[int]:
        """The processes that were there at the last reading."""
        return frozenset(self._processes)

    def read(self, now_s: float) -> Sample:
        """One reading; nothing while no process of the job is there."""
        if self.roots != self._walked:
            self._keep_orphans = self._walked is not None and self._walked <= self.roots
            self._walked = self.roots
            self._walking = Paced("the job's processes", self._walk, least_s=WALK_EVERY_S)
        self._walking.sample(now_s)
        self._keep_orphans = True
        for pid, process in list(self._processes.items()):
            if not process.read():
                process.close()
                del self._processes[pid]
        before, elapsed_s = self._before, now_s - self._at_s
        self._at_s = now_s
        self._before = {pid: process.ticks for pid, process in self._processes.items()}
        if not self._processes:
            return {}
        workers = self._workers()
        found: Sample = {
            "memory.process_tree_bytes": float(
                sum(process.resident for process in self._processes.values())
            ),
            "data_loader.workers": float(len(workers)),
            "data_loader.memory_bytes": float(sum(process.resident for process in workers)),
        }
        if before and elapsed_s > 0:
            found["cpu.process_tree_percent"] = _percent(
                before, self._processes.values(), elapsed_s
            )
            found["data_loader.cpu_percent"] = _percent(before, workers, elapsed_s)
        found.update(self._sampling_threads.sample(now_s))
        return found

    def _workers(self) -> list[_Process]:
        named = [process for process in self._processes.values() if process.name == WORKER]
        if named:
            return named
        parents = {process.parent for process in self._processes.values()}
        return [
            process
            for process in self._processes.values()
            if process.pid not in parents and self._is_made(process)
        ]

    def _is_made(self, process: _Process) -> bool:
        """Whether Python's multiprocessing made it."""
        parent = self._processes.get(process.parent)
        if parent is None or not process.command:
            return False
        if process.command == parent.command:
            program = parent.command.split(b"\0", 1)[0]
            return os.path.basename(program).startswith(b"python")
        return any(word in process.command for word in _MADE)

    # The tree

    def _walk(self, now_s: float) -> Sample:
        known = self._processes
        below: dict[int, list[int]] = {}
        for process in known.values():
            below.setdefault(process.parent, []).append(process.pid)
        there: dict[int, _Process] = {}
        # What the job has begun is the job's, even where those in between have ended.
        waiting = [*self.roots, *(known if self._keep_orphans else ())]
        while waiting:
            pid = waiting.pop()
            if pid in there:
                continue
            process = known.get(pid) or _Process(self._root, pid, keep=len(there) < MAX_OPEN)
            if not process.read():
                continue
            process.command = self._command(pid)
            there[pid] = process
            # The kernel's list may lack some while others end.
            waiting += self._children(pid) + below.get(pid, [])
        for pid, process in known.items():
            if there.get(pid) is not process:
                process.close()
        self._processes = there
        return {}

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        try:
            threads = os.listdir(self._root / f"proc/{pid}/task")
        except OSError:
            return found
        for thread in threads:
            text = _read_once(f"{self._root}/proc/{pid}/task/{thread}/children")
            found += [int(word) for word in text.split()]
        return found

    def _command(self, pid: int) -> bytes:
        return _read_once(f"{self._root}/proc/{pid}/cmdline")

    # The threads

    def _threads(self, now_s: float) -> Sample:
        elapsed_s, self._threads_at_s = now_s - self._threads_at_s, now_s
        ticks = {pid: process.ticks for pid, process in self._processes.items()}
        earlier, self._ticks_at_sampling = self._ticks_at_sampling, ticks
        busiest = sorted(ticks, key=lambda pid: ticks[pid] - earlier.get(pid, 0), reverse=True)
        there: dict[tuple[int, int], int] = {}
        for pid in busiest[:BUSIEST]:
            try:
                threads = os.listdir(self._root / f"proc/{pid}/task")
            except OSError:
                continue
            for thread in threads[:MAX_THREADS]:
                text = _read_once(f"{self._root}/proc/{pid}/task/{thread}/stat")
                words = text[text.rfind(b")") + 2 :].split(None, 13)
                if len(words) > 12:
                    there[pid, int(thread)] = int(words[11]) + int(words[12])
        before, self._threads_before = self._threads_before, there
        most = [now - before[thread] for thread, now in there.items() if thread in before]
        if not most or elapsed_s <= 0:
            return {}
        percent = 100 * max(0, *most, 0) / _TICKS_PER_S / elapsed_s
        return {"cpu.process_tree_busiest_core_percent": min(100.0, percent)}


def _percent(before: dict[int, int], processes: Iterable[_Process], elapsed_s: float) -> float:
    """CPU share since then. A new process counts from now on, one that has gone no more."""
    spent = sum(
        max(0, process.ticks - before[process.pid])
        for process in processes
        if process.pid in before
    )
    return 100 * spent / _TICKS_PER_S / elapsed_s


def _read_once(path: str) -> bytes:
    return ProcFile(path, keep=False).read() or b""
