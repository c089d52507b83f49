"""Samples of the node, onto the bus: by helper, launcher or `start()`, one per run and node.

Each of them registers its run in the node's folder and tries to take the lock of the run. Who has
it samples, for all processes of the run on this node; the others wait, and take over when it goes.
Where a node agent (`tocsin sample`) wants to sample the run, they step aside for as long as it
lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from tocsin.bus.port import BusError, RunBus
from tocsin.emitter.node.gpus import Gpus
from tocsin.emitter.node.registry import Entry, NodeFolder, Registration, job_pids
from tocsin.emitter.node.sampler import INTERVAL_S, Node, Packer, Sampler
from tocsin.emitter.send.publisher import SAMPLES, Publisher
from tocsin.schemas.configuration.capture import SystemConfig
from tocsin.schemas.records.frames import RecordOrigin, SystemFrame
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

LAST_S: Final = 2.0
"""How long the last frames may take to be published once the report is cancelled, seconds."""

CHECK_S: Final = 2.0
"""How often it is looked whether somebody else is to sample, or does so no more, seconds."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How the node is sampled: the time between two samples, and whose space on disk is watched."""

    interval_s: float = INTERVAL_S
    folders: tuple[Path, ...] = ()

    @classmethod
    def from_section(cls, section: SystemConfig, base: Path) -> NodePlan:
        """From `capture.system`; relative folders start at `base`."""
        folders = tuple(base / folder for folder in section.folders)
        return cls(section.interval / timedelta(seconds=1), folders)

    @classmethod
    def read(cls, capture: str, base: Path) -> NodePlan:
        """From the section `capture` as JSON; the defaults for what it does not name."""
        try:
            section = _Capture.model_validate_json(capture or "{}").system
        except ValidationError as error:
            logger.warning("the defaults hold for samples: %s", error, extra={"action": "sample"})
            section = SystemConfig()
        return cls.from_section(section, base)


class _Capture(BaseModel):
    """The one part of `capture` that matters here."""

    model_config = ConfigDict(extra="ignore")

    system: SystemConfig = SystemConfig()


class NodeReport:
    """Samples this node and publishes the frames under the run's name, while it is its turn."""

    def __init__(
        self,
        bus: RunBus,
        topics: Topics,
        origin: RecordOrigin,
        *,
        folder: Path | None,
        plan: NodePlan | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        self._plan = plan or NodePlan()
        self.node: Final = Node(
            folder=folder, folders=self._plan.folders, gpus=Gpus(), visible=visible
        )
        """What is sampled; its `root_pid` is the job."""
        self._bus = bus
        self._origin = origin
        self._environ = environ
        self._registration = Registration(
            run_id=origin.run_id,
            incarnation=origin.incarnation,
            bus=bus.url,
            prefix=topics.prefix,
            folder="" if folder is None else str(folder),
            visible=visible or "",
        )
        self._frames = Publisher(topics, origin.run_id, queued=SAMPLES, ends_if_refused=True)

    async def run(self) -> None:
        """Sample and publish until cancelled; what was sampled by then is published still.

        What the bus takes too late is dropped. Cancelled, it ends within about `LAST_S`.
        """
        sampling = asyncio.create_task(self._run_in_turn(), name="sampler")
        try:
            async with contextlib.AsyncExitStack() as stack:
                producer = await self._bus.producer()
                stack.push_async_callback(producer.close)
                try:
                    await self._frames.run(producer)
                finally:
                    sampling.cancel()
                    await asyncio.wait({sampling})
                    await self._frames.finish(producer, LAST_S)
        except BusError as error:
            logger.warning("the node is not sampled: %s", error, extra={"action": "sample"})
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})
            self.node.close()
            self.node.machine.close()

    async def _run_in_turn(self) -> None:
        try:
            try:
                folder = NodeFolder.from_environ(self._environ)
                entry = folder.leave(self._registration)
            except OSError as error:
                logger.warning(
                    "no folder for locks, so others may sample this node too: %s",
                    error,
                    extra={"action": "sample"},
                )
                await self._sampler().run()
                return
            try:
                await self._sample_in_turn(folder, entry)
            finally:
                entry.remove()
        # The isolation of a probe: what it runs beside goes on.
        except Exception:
            logger.exception("the node is not sampled any more", extra={"action": "sample"})

    async def _sample_in_turn(self, folder: NodeFolder, entry: Entry) -> None:
        """Raises OSError: the file system has no locks, or the folder has gone."""
        key = entry.registration.key
        own, agent = folder.sampling(key), folder.agent(key)
        sampling: asyncio.Task[None] | None = None
        try:
            while True:
                entry.job_is(self.node.root_pid)
                if agent.is_taken():
                    await _end(sampling)
                    sampling = None
                    own.release()
                elif own.acquire():
                    there = (found for found in folder.registrations() if found.key == key)
                    self.node.other_roots = job_pids(there)
                    if sampling is None:
                        sampling = asyncio.create_task(self._sampler().run(), name="samples")
                if sampling is None:
                    await asyncio.sleep(CHECK_S)
                elif sampling in (await asyncio.wait({sampling}, timeout=CHECK_S))[0]:
                    sampling.result()
        finally:
            await _end(sampling)
            own.release()

    def _sampler(self) -> Sampler[SystemFrame]:
        interval_s = self._plan.interval_s
        packer = Packer(self._origin, platform.node(), interval_s=interval_s)
        return Sampler.for_job(self.node, packer, self._frames.publish_frame, interval_s=interval_s)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
