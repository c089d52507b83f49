"""The node agent (`tocsin sample`): samples this node for each run that is registered here.

One sampler reads the machine once, however many runs there are; each run gets its own copy, with
what is of its job alone: processes, control group, GPUs, disk. The launchers of those runs see the
agent's lock and step aside (`tocsin.emitter.node.publisher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import platform
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from tocsin.bus.port import Bus, BusError
from tocsin.emitter.node.gpus import Gpus
from tocsin.emitter.node.kernel_log import XidsSince
from tocsin.emitter.node.lock import NodeLock
from tocsin.emitter.node.publisher import LAST_S, NodePlan
from tocsin.emitter.node.registry import NodeFolder, Registration, job_pids
from tocsin.emitter.node.sampler import Machine, Node, Packer, Sample, Sampler
from tocsin.emitter.send.publisher import SAMPLES, Publisher
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.frames import RecordOrigin, SystemFrame
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How often it is looked for runs, and for the lock of one that another samples, seconds."""

AGAIN_S: Final = 10.0
"""Pause before a bus that could not be opened is tried again, seconds."""

Find = Callable[[], Awaitable[Sequence[Registration]]]
"""Gives the runs that are to be sampled now; several registrations may be of one run."""


class _Copy:
    """The samples of one run."""

    def __init__(self, found: Sequence[Registration], machine: Machine, plan: NodePlan) -> None:
        newest = found[-1]
        self.run_id: Final = newest.run_id
        self.frames: Final = Publisher(
            Topics(newest.prefix), newest.run_id, queued=SAMPLES, ends_if_refused=True
        )
        self.gone = asyncio.Event()
        self._interval_s = plan.interval_s
        self._node = Node(
            folder=Path(newest.folder) if newest.folder else None,
            folders=plan.folders,
            visible=newest.visible,
            machine=machine,
        )
        # The sampler's thread adds to the packer, the loop's takes what is left.
        self._lock = threading.Lock()
        self._incarnation = ""
        self._packer = self._packer_of(found[-1])
        self._xids = XidsSince()
        self.update(found)

    def update(self, found: Sequence[Registration]) -> None:
        """Who speaks for the run may change; a new incarnation begins a new frame, and its Xids
        are counted from zero."""
        self._node.other_roots = job_pids(found)
        newest = found[-1]
        if newest.incarnation != self._incarnation:
            self.flush()
            self._incarnation = newest.incarnation
            with self._lock:
                self._packer = self._packer_of(newest)
                self._xids = XidsSince()

    def frames_of(self, machine: Sample, now_s: float, at_us: int) -> Sequence[SystemFrame]:
        """In the sampler's thread."""
        sample = self._node.complete(machine, now_s)
        with self._lock:
            return self._packer.add(self._xids.count(sample), at_us)

    def flush(self) -> None:
        """Send what is not complete yet."""
        with self._lock:
            frames = self._packer.flush()
        for frame in frames:
            self.frames.publish_frame(frame)

    def _packer_of(self, registration: Registration) -> Packer:
        origin = RecordOrigin(run_id=registration.run_id, incarnation=registration.incarnation)
        return Packer(origin, platform.node(), interval_s=self._interval_s)

    def close(self) -> None:
        self._node.close()


async def _turn(lock: NodeLock) -> None:
    """Wait until whoever has it steps aside. Raises OSError."""
    while True:
        if lock.acquire():
            return
        await asyncio.sleep(POLL_S)


class NodeAgent:
    """Serves what `find` gives, until it is cancelled."""

    def __init__(
        self,
        folder: NodeFolder,
        find: Find,
        open_bus: Callable[[Registration], Bus],
        *,
        plan: NodePlan,
    ) -> None:
        """`open_bus` gives the bus of a registration, not yet entered; raises TocsinError."""
        self._folder = folder
        self._find = find
        self._open_bus = open_bus
        self._plan = plan
        self._machine = Machine(gpus=Gpus())
        self._copies: dict[str, _Copy] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, list[Registration]] = {}

    async def run(self) -> None:
        """Until cancelled; what was sampled by then is published still."""
        sampler = Sampler(self._sample, self._hand, interval_s=self._plan.interval_s)
        sampling = asyncio.create_task(sampler.run(), name="samples")
        try:
            while not sampling.done():
                self._sort(await self._find())
                await asyncio.wait({sampling}, timeout=POLL_S)
            sampling.result()
        finally:
            sampling.cancel()
            await asyncio.wait({sampling, *self._end()})
            self._machine.close()

    def _end(self) -> Sequence[asyncio.Task[None]]:
        tasks = list(self._serving.values())
        for task in tasks:
            task.cancel()
        return tasks

    def _sort(self, found: Sequence[Registration]) -> None:
        """Begin with runs that are new, and end with those that have gone."""
        known: dict[str, list[Registration]] = {}
        for registration in found:
            known.setdefault(registration.key, []).append(registration)
        self._known = known
        for key in known:
            if (copy := self._copies.get(key)) is not None:
                copy.update(known[key])
            if key not in self._serving:
                task = asyncio.create_task(self._serve(key), name=f"run {known[key][-1].run_id}")
                self._serving[key] = task
                task.add_done_callback(functools.partial(self._served, key))
        for key, copy in self._copies.items():
            if key not in known:
                copy.gone.set()

    def _served(self, key: str, _: asyncio.Task[None]) -> None:
        self._serving.pop(key, None)

    async def _serve(self, key: str) -> None:
        run_id = self._known[key][-1].run_id
        wanted, own = self._folder.agent(key), self._folder.sampling(key)
        try:
            if not wanted.acquire():
                # Another agent has it; this one would take over.
                await asyncio.sleep(POLL_S)
                return
            async with contextlib.AsyncExitStack() as stack:
                newest = self._known[key][-1]
                bus = await stack.enter_async_context(self._open_bus(newest))
                if newest.bus.startswith("embedded:"):
                    # The run may have registered before it has made them.
                    await bus.init(Topics(newest.prefix).specs())
                producer = await bus.producer()
                stack.push_async_callback(producer.close)
                await _turn(own)
                if key not in self._known:
                    return
                copy = _Copy(self._known[key], self._machine, self._plan)
                self._copies[key] = copy
                logger.info("samples for run %s", run_id, extra={"action": "sample"})
                publishing = asyncio.create_task(copy.frames.run(producer), name="publish")
                gone = asyncio.create_task(copy.gone.wait(), name="gone")
                try:
                    await asyncio.wait({publishing, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if publishing.done():
                        publishing.result()
                finally:
                    del self._copies[key]
                    for task in (publishing, gone):
                        task.cancel()
                    await asyncio.wait({publishing, gone})
                    copy.flush()
                    await copy.frames.finish(producer, LAST_S)
                    copy.close()
                logger.info("run %s has left this node", run_id, extra={"action": "sample"})
        except (BusError, ConfigurationError, OSError, TimeoutError) as error:
            logger.warning(
                "run %s is not sampled, tried again in %g s: %s",
                run_id,
                AGAIN_S,
                error,
                extra={"action": "sample"},
            )
            own.release()
            wanted.release()
            await asyncio.sleep(AGAIN_S)
        finally:
            own.release()
            wanted.release()

    def _sample(self, now_s: float, at_us: int) -> Sequence[tuple[_Copy, SystemFrame]]:
        """In the sampler's thread."""
        copies = list(self._copies.values())
        if not copies:
            return ()
        machine = self._machine.sample(now_s)
        return [(copy, frame) for copy in copies for frame in copy.frames_of(machine, now_s, at_us)]

    @staticmethod
    def _hand(sample: tuple[_Copy, SystemFrame]) -> None:
        copy, frame = sample
        copy.frames.publish_frame(frame)
