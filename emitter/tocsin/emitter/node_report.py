"""Samples of the node, onto the bus: by the helper, or by the launcher where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from pathlib import Path
from typing import Final

from tocsin.bus.port import Bus, BusError, BusUnavailable, Outgoing, Partition, Producer
from tocsin.emitter.gpus import Gpus
from tocsin.emitter.sampler import Node, Packer, Sampler
from tocsin.schemas.identity import new_id
from tocsin.schemas.telemetry import Speaker, SystemFrame
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.schemas.wire import meta_of

logger = logging.getLogger(__name__)

WAITING: Final = 32
"""Frames kept while the bus is away: the newest, about three minutes' worth."""


class NodeReport:
    """Samples this node and publishes the frames under the run's name; one per run and node."""

    def __init__(self, bus: Bus, topics: Topics, speaker: Speaker, *, folder: Path | None) -> None:
        self.node: Final = Node(folder=folder, gpus=Gpus())
        """What is sampled; its `root_pid` is the job."""
        self._bus = bus
        self._speaker = speaker
        self._partition = Partition(topics.telemetry, telemetry_partition(speaker.run_id))
        self._boot = new_id()
        self._seq = 0
        self._frames: asyncio.Queue[SystemFrame] = asyncio.Queue(WAITING)

    async def run(self) -> None:
        """Sample and publish until cancelled. What the bus does not take is dropped."""
        sampler = Sampler(self.node, Packer(self._speaker, platform.node()), self._put)
        sampling = asyncio.create_task(sampler.run(), name="sampler")
        try:
            async with contextlib.AsyncExitStack() as stack:
                producer = await self._bus.producer()
                stack.push_async_callback(producer.close)
                while True:
                    await self._publish(producer, await self._frames.get())
        except BusError as error:
            logger.warning("the node is not sampled: %s", error, extra={"action": "sample"})
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})

    def _put(self, frame: SystemFrame) -> None:
        if self._frames.full():
            self._frames.get_nowait()
        self._frames.put_nowait(frame)

    async def _publish(self, producer: Producer, frame: SystemFrame) -> None:
        headers = meta_of(frame, boot=self._boot, seq=self._seq).headers()
        self._seq += 1
        key = self._speaker.run_id.encode()
        try:
            await producer.publish([Outgoing(self._partition, key, frame.encode(), headers)])
        except BusUnavailable as error:
            logger.warning("a frame of samples is lost: %s", error, extra={"action": "sample"})
