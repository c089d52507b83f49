"""Publishes packed samples of one run; what the bus does not take in time is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from tocsin.bus.port import BusUnavailable, Outgoing, Partition, Writer
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition

logger = logging.getLogger(__name__)

WAITING: Final = 32
"""Frames kept while the bus is away: the newest, about three minutes' worth."""


class FrameSender:
    """One numbered sequence of records, as of a process."""

    def __init__(self, topics: Topics, run_id: str) -> None:
        self._partition = Partition(topics.telemetry, telemetry_partition(run_id))
        self._key = run_id.encode()
        self._boot = new_id()
        self._seq = 0
        self._frames: asyncio.Queue[SystemFrame] = asyncio.Queue(WAITING)
        self._away = False

    def put(self, frame: SystemFrame) -> None:
        """Send it when its turn comes; does not wait. On the event loop."""
        if self._frames.full():
            self._frames.get_nowait()
            self._seq += 1  # readers see by the gap that one was dropped
        self._frames.put_nowait(frame)

    async def publish(self, producer: Writer) -> None:
        """For ever. Raises BusError, but not for a bus that is away."""
        while True:
            await self._publish(producer, await self._frames.get())

    async def rest(self, producer: Writer, *, timeout_s: float) -> None:
        """What waits still, for so long at most. Raises BusError, as above."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._frames.empty():
                    await self._publish(producer, self._frames.get_nowait())

    async def _publish(self, producer: Writer, frame: SystemFrame) -> None:
        headers = meta_of(frame, boot=self._boot, seq=self._seq).headers()
        self._seq += 1
        try:
            await producer.publish([Outgoing(self._partition, self._key, frame.encode(), headers)])
        except BusUnavailable as error:
            # Once per outage: a line every few seconds says no more.
            logger.log(
                logging.DEBUG if self._away else logging.WARNING,
                "samples of this node are lost: %s",
                error,
                extra={"action": "sample"},
            )
            self._away = True
        else:
            self._away = False
