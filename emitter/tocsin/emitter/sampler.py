"""What the node does: CPU, memory, disk, GPUs, sampled twice a second, packed every few seconds.

`Node.sample` reads once; `Sampler` keeps the rhythm and packs. Whoever runs it sends the frames:
the helper process, the launcher where no helper is, or `tocsin sample`.

Columns that are not there on this machine are left out, never guessed. One packed frame has the
columns of its first sample; where they change (the job's processes end, a GPU falls off) another
frame begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from tocsin.emitter import cgroups
from tocsin.emitter.gpus import Gpus
from tocsin.schemas.telemetry import Speaker, SystemFrame

INTERVAL_S: Final = 0.5
PACKED_S: Final = 5.0

TREE_EVERY: Final = 10
"""Walking the job's process tree costs as much as all other readings: each 10th sample looks for
new processes, the others read those that are known."""

Sample = dict[str, float]


class Node:
    """Reads this node. Rates and percentages are over the time since the sample before."""

    def __init__(
        self, *, root_pid: int | None = None, folder: Path | None = None, gpus: Gpus | None = None
    ) -> None:
        self.root_pid = root_pid
        self._folder = folder
        self._gpus = gpus
        self._at: float | None = None
        self._disk: tuple[int, int] | None = None
        self._network: tuple[int, int] | None = None
        self._tree: dict[int, psutil.Process] = {}
        self._walked: int | None = None
        self._cpu_s: dict[int, float] = {}
        self._n = 0
        psutil.cpu_percent(interval=None)

    def sample(self, now_s: float) -> Sample:
        """One reading; `now_s` is a monotonic clock. May block for some milliseconds."""
        elapsed_s = None if self._at is None else max(now_s - self._at, 1e-6)
        self._at = now_s
        found: Sample = {}
        if elapsed_s is not None:
            found["cpu.percent"] = psutil.cpu_percent(interval=None)
        memory = psutil.virtual_memory()
        found["memory.used_bytes"] = float(memory.total - memory.available)
        found["memory.total_bytes"] = float(memory.total)
        if self._n % TREE_EVERY == 0:
            self._limit = cgroups.memory_limit(self.root_pid, memory.total)
        found["memory.limit_bytes"] = float(self._limit)
        swap = psutil.swap_memory() if self._n % TREE_EVERY == 0 else None
        self._swap = swap.used if swap is not None else self._swap
        found["swap.used_bytes"] = float(self._swap)
        self._processes(found, elapsed_s)
        self._rates(found, elapsed_s)
        if self._folder is not None:
            try:
                disk = os.statvfs(self._folder)
                found["disk.free_bytes"] = float(disk.f_bavail * disk.f_frsize)
                found["disk.total_bytes"] = float(disk.f_blocks * disk.f_frsize)
            except OSError:
                self._folder = None
        if self._gpus is not None:
            found.update(self._gpus.sample(self._tree))
        self._n += 1
        return found

    def _processes(self, found: Sample, elapsed_s: float | None) -> None:
        if self.root_pid is None:
            return
        if self._n % TREE_EVERY == 0 or self._walked != self.root_pid:
            self._walked = self.root_pid
            self._walk(self.root_pid)
        cpu_s: dict[int, float] = {}
        memory = 0
        for pid, process in list(self._tree.items()):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    memory += process.memory_info().rss
            except psutil.Error:
                del self._tree[pid]
                continue
            cpu_s[pid] = times.user + times.system
        if not self._tree:
            return
        found["memory.process_tree_bytes"] = float(memory)
        if elapsed_s is not None:
            # A process that is new counts from now on; one that has gone, no more.
            spent = sum(
                max(0.0, s - self._cpu_s[pid]) for pid, s in cpu_s.items() if pid in self._cpu_s
            )
            found["cpu.process_tree_percent"] = 100 * spent / elapsed_s
        self._cpu_s = cpu_s

    def _walk(self, root_pid: int) -> None:
        try:
            root = psutil.Process(root_pid)
            tree = {child.pid: child for child in root.children(recursive=True)}
            tree[root.pid] = root
        except psutil.Error:
            self._tree = {}
            return
        # A Process object of before remembers what it has read; keep it where it is the same one.
        self._tree = {
            pid: self._tree[pid] if self._tree.get(pid) == process else process
            for pid, process in tree.items()
        }

    def _rates(self, found: Sample, elapsed_s: float | None) -> None:
        disk = psutil.disk_io_counters()
        if disk is not None:
            now = (disk.read_bytes, disk.write_bytes)
            if self._disk is not None and elapsed_s is not None:
                found["disk.read_bytes_per_s"] = max(0, now[0] - self._disk[0]) / elapsed_s
                found["disk.write_bytes_per_s"] = max(0, now[1] - self._disk[1]) / elapsed_s
            self._disk = now
        network = psutil.net_io_counters()
        if network is not None:
            now = (network.bytes_recv, network.bytes_sent)
            if self._network is not None and elapsed_s is not None:
                found["network.received_bytes_per_s"] = (
                    max(0, now[0] - self._network[0]) / elapsed_s
                )
                found["network.sent_bytes_per_s"] = max(0, now[1] - self._network[1]) / elapsed_s
            self._network = now

    _swap: int = 0
    _limit: int = 0


class Packer:
    """Puts samples with equal columns into one frame. Pure."""

    def __init__(self, speaker: Speaker, node: str, *, packed_s: float = PACKED_S) -> None:
        self._speaker = speaker
        self._node = node
        self._packed_us = round(packed_s * 1_000_000)
        self._columns: tuple[str, ...] = ()
        self._at_us: list[int] = []
        self._rows: list[list[float]] = []

    def add(self, sample: Sample, at_us: int) -> list[SystemFrame]:
        """Take a sample; return the frames that are complete now (Unix time in microseconds)."""
        complete: list[SystemFrame] = []
        columns = tuple(sorted(sample))
        # A clock that went back must not hold a frame for ever: any distance counts.
        if self._rows and (
            columns != self._columns or abs(at_us - self._at_us[0]) >= self._packed_us
        ):
            complete = self.flush()
        self._columns = columns
        self._at_us.append(max(at_us, 0))
        self._rows.append([sample[name] for name in columns])
        return complete

    def flush(self) -> list[SystemFrame]:
        """What is not complete yet."""
        if not self._rows:
            return []
        frame = SystemFrame(
            speaker=self._speaker,
            node=self._node[:255],
            at_us=np.array(self._at_us, np.uint64),
            columns=self._columns,
            values=np.array(self._rows, np.float64),
        )
        self._at_us, self._rows = [], []
        return [frame]


class Sampler:
    """Samples at a steady rhythm and hands packed frames on; runs as a task of an event loop."""

    def __init__(
        self,
        node: Node,
        packer: Packer,
        send: Callable[[SystemFrame], None],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._node = node
        self._packer = packer
        self._send = send
        self._interval_s = interval_s

    async def run(self) -> None:
        """Until cancelled; then the rest is handed on. `send` must not block."""
        due = time.monotonic()
        try:
            while True:
                sample = await _in_thread(self._node, time.monotonic())
                for frame in self._packer.add(sample, time.time_ns() // 1000):
                    self._send(frame)
                due = max(due + self._interval_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
        finally:
            for frame in self._packer.flush():
                self._send(frame)


async def _in_thread(node: Node, now_s: float) -> Sample:
    """A sample, taken in a thread: a slow NVML or disk must not hold up the loop.

    In a daemon thread of its own: a pool's would be waited for when the loop and the process end,
    and a driver or a network file system can hang for ever.
    """
    loop = asyncio.get_running_loop()
    taken: asyncio.Future[Sample] = loop.create_future()

    def settle(sample: Sample | None, error: Exception | None) -> None:
        if taken.done():  # cancelled meanwhile
            return
        if sample is not None:
            taken.set_result(sample)
        elif error is not None:
            taken.set_exception(error)

    def work() -> None:
        sample, failure = None, None
        try:
            sample = node.sample(now_s)
        # Handed to whoever waits for the sample.
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, sample, failure)

    threading.Thread(target=work, name="tocsin-sample", daemon=True).start()
    return await taken
