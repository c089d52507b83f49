"""What the node does: CPU, memory, disks, network, GPUs: sampled twice a second, and packed.

`Node.sample` reads once; `Sampler` keeps the rhythm and packs. Whoever runs it sends the frames:
the helper process, the launcher where no helper is, `start()` without either, or `tocsin sample`.

Columns that are not there on this machine are left out, never guessed; each source lists in its
module which it has. One packed frame has the columns of its first sample; where they change (the
job's processes end, a GPU falls off) another frame begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np

from tocsin.emitter.node.cgroups import GroupSamples
from tocsin.emitter.node.cpu import CpuSamples
from tocsin.emitter.node.disks import SPACE_EVERY_S, DiskSpace, DiskTraffic
from tocsin.emitter.node.gpus import Gpus, GpusOfJob
from tocsin.emitter.node.infiniband import EVERY_S as INFINIBAND_EVERY_S
from tocsin.emitter.node.infiniband import InfinibandSamples
from tocsin.emitter.node.kernel_log import XidSamples
from tocsin.emitter.node.memory import MemorySamples
from tocsin.emitter.node.network import NetworkSamples
from tocsin.emitter.node.pressure import EVERY_S as PRESSURE_EVERY_S
from tocsin.emitter.node.pressure import PressureSamples
from tocsin.emitter.node.proc_files import ROOT
from tocsin.emitter.node.process_tree import ProcessTree
from tocsin.emitter.node.sources import Paced, Sample, ThreadedSource
from tocsin.emitter.process.stderr import print_line
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.frames import RecordOrigin, SystemFrame

__all__ = ["INTERVAL_S", "PACKED_S", "Machine", "Node", "Packer", "Sample", "Sampler"]

INTERVAL_S: Final = 0.5
PACKED_S: Final = 5.0

F = TypeVar("F")

END_S: Final = 1.0
"""How long the end waits for a sample that is being taken, seconds."""


class Machine:
    """What is the same for all jobs of this node."""

    def __init__(
        self,
        *,
        gpus: Gpus | None = None,
        root: Path = ROOT,
        report: Callable[[str], None] = print_line,
    ) -> None:
        self.gpus: Final = gpus
        self.memory: Final = MemorySamples(root)
        self._beside: list[ThreadedSource] = []
        # An adapter's firmware is asked where there is an adapter only.
        infiniband = InfinibandSamples(root)
        if (root / "sys/class/infiniband").is_dir():
            self._beside.append(
                ThreadedSource(
                    "InfiniBand ports", infiniband.read, least_s=INFINIBAND_EVERY_S, report=report
                )
            )
        sources = [
            Paced("CPU", CpuSamples(root).read, report=report),
            Paced("memory", self.memory.read, report=report),
            Paced("disks", DiskTraffic(root).read, report=report),
            Paced("network", NetworkSamples(root).read, report=report),
            Paced("pressure", PressureSamples(root).read, least_s=PRESSURE_EVERY_S, report=report),
        ]
        self._xids: XidSamples | None = None
        if gpus is not None:
            self._beside.append(ThreadedSource("GPUs", gpus.read, report=report))
            self._xids = XidSamples(lambda: gpus.places, root)
            sources.append(Paced("kernel log", self._xids.read, report=report))
        self._sources: list[Paced | ThreadedSource] = [*sources, *self._beside]

    def sample(self, now_s: float) -> Sample:
        """One reading; `now_s` is a monotonic clock. May block for some milliseconds."""
        found: Sample = {}
        for source in self._sources:
            found.update(source.sample(now_s))
        return found

    def close(self) -> None:
        """Let go of what is kept open; threads that hang are left to themselves."""
        for source in self._beside:
            source.close()
        if self._xids is not None:
            self._xids.close()


class Node:
    """Reads this node for one job. Rates and percentages are over the time since the sample before.

    `root_pid` and `other_roots` are the job's processes; all below them are its, too.
    """

    def __init__(
        self,
        *,
        root_pid: int | None = None,
        folder: Path | None = None,
        folders: Sequence[Path] = (),
        gpus: Gpus | None = None,
        visible: str | None = None,
        machine: Machine | None = None,
        root: Path = ROOT,
        report: Callable[[str], None] = print_line,
    ) -> None:
        """`folder` is the job's working folder, `folders` are others whose space is watched.

        `visible` is the job's CUDA_VISIBLE_DEVICES. `machine` may be shared by several jobs.
        """
        self.root_pid = root_pid
        self.other_roots: frozenset[int] = frozenset()
        self.machine: Final = machine or Machine(gpus=gpus, root=root, report=report)
        self._gpus = (
            None if self.machine.gpus is None else GpusOfJob(self.machine.gpus, visible=visible)
        )
        self._tree = ProcessTree(root)
        self._group = GroupSamples(root)
        self._sources: list[Paced | ThreadedSource] = [
            Paced("the job's processes", self._tree.read, report=report),
            Paced("control group", self._group.read, report=report),
        ]
        space = DiskSpace(folder, folders)
        self._space: ThreadedSource | None = None
        if space:
            self._space = ThreadedSource(
                "space on disk", space.read, least_s=SPACE_EVERY_S, report=report
            )
            self._sources.append(self._space)

    def sample(self, now_s: float) -> Sample:
        """One reading; `now_s` is a monotonic clock. May block for some milliseconds."""
        return self.complete(self.machine.sample(now_s), now_s)

    def complete(self, machine: Sample, now_s: float) -> Sample:
        """The values of the machine, and those of this job alone."""
        found = dict(machine)
        own = self.root_pid
        self._tree.roots = self.other_roots | ({own} if own is not None else set())
        self._group.pid = own if own is not None else min(self.other_roots, default=None)
        self._group.total = self.machine.memory.total
        for source in self._sources:
            found.update(source.sample(now_s))
        if self._gpus is not None:
            found.update(self._gpus.sample(self._tree.pids))
        return found

    def close(self) -> None:
        """Let go of what is this job's; the machine may be others', too."""
        if self._space is not None:
            self._space.close()


class Packer:
    """Puts samples with equal columns into one frame. Pure."""

    def __init__(
        self,
        origin: RecordOrigin,
        node: str,
        *,
        packed_s: float | None = None,
        interval_s: float = 0.0,
    ) -> None:
        """`interval_s` is how far the next sample is away: a frame does not wait for it in vain."""
        self._origin = origin
        self._node = node
        packed_s = PACKED_S if packed_s is None else packed_s
        self._packed_us = round((packed_s - interval_s) * 1_000_000)
        self._waits = interval_s == 0
        self._columns: tuple[str, ...] = ()
        self._at_us: list[int] = []
        self._rows: list[list[float]] = []

    def add(self, sample: Sample, at_us: int) -> list[SystemFrame]:
        """Take a sample; return the frames that are complete now (Unix time in microseconds)."""
        complete: list[SystemFrame] = []
        columns = tuple(sample)
        if columns != self._columns and set(columns) == set(self._columns):
            columns = self._columns
        # A clock that went back must not hold a frame for ever: any distance counts.
        if self._rows and (columns != self._columns or (self._waits and self._is_full(at_us))):
            complete = self.flush()
        self._columns = columns
        self._at_us.append(max(at_us, 0))
        self._rows.append([sample[name] for name in columns])
        if not self._waits and self._is_full(at_us):
            complete += self.flush()
        return complete

    def _is_full(self, at_us: int) -> bool:
        return abs(at_us - self._at_us[0]) >= self._packed_us

    def flush(self) -> list[SystemFrame]:
        """What is not complete yet."""
        if not self._rows:
            return []
        order = sorted(range(len(self._columns)), key=self._columns.__getitem__)
        frame = SystemFrame(
            origin=self._origin,
            node=self._node[:255],
            at_us=np.array(self._at_us, np.uint64),
            columns=tuple(self._columns[place] for place in order),
            values=np.array(self._rows, np.float64)[:, order],
        )
        self._at_us, self._rows = [], []
        return [frame]


class Sampler(Generic[F]):
    """Samples at a steady rhythm, in a daemon thread of its own, and hands frames to a loop.

    The thread is a daemon, and nobody waits for it long: a driver or a network file system can hang
    for ever. The loop is woken up only when a frame is complete.
    """

    def __init__(
        self,
        take: Callable[[float, int], Sequence[F]],
        send: Callable[[F], None],
        *,
        flush: Callable[[], Sequence[F]] = tuple,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Both functions that give frames are called in the thread, `send` on the loop.

        Args:
            take: gets a monotonic clock (seconds) and Unix time (microseconds), and gives the
                frames that are complete.
            send: gets each of them.
            flush: gives what is left at the end.
            interval_s: from one sample to the next.
        """
        self._take = take
        self._flush = flush
        self._send = send
        self._interval_s = interval_s
        self._ending = threading.Event()

    @staticmethod
    def for_job(
        node: Node,
        packer: Packer,
        send: Callable[[SystemFrame], None],
        *,
        interval_s: float = INTERVAL_S,
    ) -> Sampler[SystemFrame]:
        """Build a sampler of this node for one job."""
        return Sampler(
            lambda now_s, at_us: packer.add(node.sample(now_s), at_us),
            send,
            flush=packer.flush,
            interval_s=interval_s,
        )

    async def run(self) -> None:
        """Until cancelled; then the rest is handed on. `send` must not block.

        Raises:
            RuntimeError: the system refuses a thread.
            Exception: what taking a sample raised.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(
            target=self._work, args=(loop, done), name="tocsin-sample", daemon=True
        )
        thread.start()
        try:
            await asyncio.shield(done)
        finally:
            self._ending.set()
            if not done.done():
                await asyncio.wait({done}, timeout=END_S)

    def _work(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        failure: Exception | None = None
        try:
            due_s = time.monotonic()
            while not self._ending.is_set():
                self._hand(loop, self._take(time.monotonic(), unix_us()))
                due_s = max(due_s + self._interval_s, time.monotonic())
                self._ending.wait(due_s - time.monotonic())
            self._hand(loop, self._flush())
        # Handed to whoever runs the sampler.
        except Exception as error:
            failure = error

        def settle() -> None:
            if done.done():
                return
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle)

    def _hand(self, loop: asyncio.AbstractEventLoop, frames: Sequence[F]) -> None:
        for frame in frames:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._send, frame)
