"""Samples of the node, onto the bus: by the helper, or by the launcher where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
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

LAST_S: Final = 2.0
"""How long the last frames may take to be published once the report is cancelled, seconds."""


class NodeReport:
    """Samples this node and publishes the frames under the run's name; one per run and node."""

    def __init__(self, bus: Bus, topics: Topics, speaker: Speaker, *, folder: Path | None) -> None:
        self.node: Final = Node(
            folder=folder, gpus=Gpus(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        )
        """What is sampled; its `root_pid` is the job."""
        self._bus = bus
        self._speaker = speaker
        self._partition = Partition(topics.telemetry, telemetry_partition(speaker.run_id))
        self._boot = new_id()
        self._seq = 0
        self._frames: asyncio.Queue[SystemFrame] = asyncio.Queue(WAITING)

    async def run(self) -> None:
        """Sample and publish until cancelled; what was sampled by then is published still.

        What the bus does not take is dropped. Cancelled, it ends within about `LAST_S`.
        """
        sampling = asyncio.create_task(self._sample(), name="sampler")
        try:
            async with contextlib.AsyncExitStack() as stack:
                producer = await self._bus.producer()
                stack.push_async_callback(producer.close)
                try:
                    while True:
                        await self._publish(producer, await self._frames.get())
                finally:
                    sampling.cancel()
                    await asyncio.wait({sampling})
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LAST_S):
                            while not self._frames.empty():
                                await self._publish(producer, self._frames.get_nowait())
        except BusError as error:
            logger.warning("the node is not sampled: %s", error, extra={"action": "sample"})
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})

    async def _sample(self) -> None:
        sampler = Sampler(self.node, Packer(self._speaker, platform.node()), self._put)
        try:
            await sampler.run()
        # The wall of a probe: what it runs beside goes on.
        except Exception:
            logger.exception("the node is not sampled any more", extra={"action": "sample"})

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
