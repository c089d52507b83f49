"""Publishes the events of one process about its run: numbered, in order, without waiting."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from tocsin.bus.port import BusError, Outgoing, Partition, Writer
from tocsin.schemas.errors import RecordTooLarge, UnavailableError
from tocsin.schemas.ids import new_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition

logger = logging.getLogger(__name__)

QUEUED: Final = 1_000
"""Records that wait while the bus is away; beyond it the oldest is dropped, and counted."""

PUBLISH_S: Final = 10.0
_PAUSE_S: Final = 0.5


class Publisher:
    """Publishes events about one run on its telemetry partition, under one source.

    It outlives a bus: what is published between two buses waits for the next one.
    """

    def __init__(
        self,
        topics: Topics,
        run_id: str,
        *,
        who: str = "launcher",
        now_ms: Callable[[], int] = unix_ms,
        observe: Callable[[Data, int], None] | None = None,
    ) -> None:
        self.dropped = 0
        self._partition = Partition(topics.telemetry, telemetry_partition(run_id))
        self._key = run_id.encode()
        self._source = f"/runs/{run_id}/{who}"
        self._boot = new_id()
        self._seq = 0
        self._now_ms = now_ms
        self._observe = observe
        self._queue: deque[Outgoing] = deque()
        self._waiting = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def unpublished(self) -> int:
        """Records that were dropped, refused, or have not been acknowledged by now."""
        return self.dropped + len(self._queue)

    def publish(self, data: Data) -> None:
        """Queue an event; never waits."""
        seq, self._seq = self._seq, self._seq + 1
        now_ms = self._now_ms()
        event = Event.of(data, id=f"{self._boot}/{seq}", source=self._source, time_ms=now_ms)
        headers = meta_of(event, boot=self._boot, seq=seq).headers()
        self._queue.append(Outgoing(self._partition, self._key, event.encode(), headers))
        if len(self._queue) > QUEUED:
            self._queue.popleft()
            self.dropped += 1
        self._empty.clear()
        self._waiting.set()
        if self._observe is not None:
            self._observe(data, now_ms)

    async def run(self, producer: Writer) -> None:
        """Publish what is queued by way of `producer`, for ever; while its bus is away, try again.

        Once cancelled it may be called again, with another producer; what was not acknowledged is
        published again.
        """
        if self._queue:
            self._waiting.set()
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._queue:
                batch = list(self._queue)[:100]
                try:
                    async with asyncio.timeout(PUBLISH_S):
                        await producer.publish(batch)
                except (UnavailableError, TimeoutError):
                    await asyncio.sleep(_PAUSE_S)
                    continue
                except (BusError, RecordTooLarge):
                    logger.warning("the bus refused events of this run", exc_info=True)
                    self.dropped += len(batch)
                # The queue may have dropped some of these meanwhile, from the same end.
                taken = set(map(id, batch))
                while self._queue and id(self._queue[0]) in taken:
                    self._queue.popleft()
            self._empty.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all events are acknowledged (or given up); False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
