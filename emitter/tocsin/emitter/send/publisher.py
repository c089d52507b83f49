"""Publishes the events and samples of one process about its run: numbered, in order, without
waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tocsin.bus.port import BusError, Outgoing, Partition, Writer
from tocsin.schemas.errors import RecordTooLarge, UnavailableError
from tocsin.schemas.ids import new_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition

logger = logging.getLogger(__name__)

QUEUED: Final = 1_000
"""Records that wait while the bus is away; beyond it the oldest is dropped, and counted."""

SAMPLES: Final = 32
"""The same for samples of a node: about three minutes' worth."""

PUBLISH_S: Final = 10.0
_PAUSE_S: Final = 0.5


class Publisher:
    """Publishes records about one run on its telemetry partition, under one source.

    It outlives a bus: what is published between two buses waits for the next one.
    """

    def __init__(
        self,
        topics: Topics,
        run_id: str,
        *,
        who: str = "launcher",
        queued: int = QUEUED,
        ends_if_refused: bool = False,
        now_ms: Callable[[], int] = unix_ms,
        observe: Callable[[Data, int], None] | None = None,
    ) -> None:
        """`ends_if_refused` is for who can open the bus anew: `run` raises then."""
        self.dropped = 0
        self._queued = queued
        self._ends_if_refused = ends_if_refused
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
        now_ms = self._now_ms()
        event_id = f"{self._boot}/{self._seq}"
        self._put(Event.wrap(data, id=event_id, source=self._source, time_ms=now_ms))
        if self._observe is not None:
            self._observe(data, now_ms)

    def publish_frame(self, frame: SystemFrame) -> None:
        """Queue a frame; never waits."""
        self._put(frame)

    def _put(self, record: Event[Data] | SystemFrame) -> None:
        headers = meta_of(record, boot=self._boot, seq=self._seq).headers()
        self._seq += 1
        self._queue.append(Outgoing(self._partition, self._key, record.encode(), headers))
        if len(self._queue) > self._queued:
            self._queue.popleft()
            if self.dropped == 0:
                logger.warning("records of this run are lost: the bus has not taken any for long")
            self.dropped += 1
        self._empty.clear()
        self._waiting.set()

    async def run(self, producer: Writer) -> None:
        """Publish what is queued by way of `producer`, for ever; while its bus is away, try again.

        Once it has ended it may be called again, with another producer; what was not acknowledged
        is published again. Raises BusError if the constructor was asked for that.
        """
        while True:
            await self._publish_queued(producer)
            await self._waiting.wait()

    async def finish(self, producer: Writer, timeout_s: float) -> None:
        """Once `run` has ended: publish what is queued, for that long at most. Raises as that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._publish_queued(producer)

    async def _publish_queued(self, producer: Writer) -> None:
        self._waiting.clear()
        while self._queue:
            batch = list(self._queue)[:100]
            try:
                async with asyncio.timeout(PUBLISH_S):
                    await producer.publish(batch)
            except (UnavailableError, TimeoutError):
                await asyncio.sleep(_PAUSE_S)
                continue
            except (BusError, RecordTooLarge) as error:
                self._remove(batch)
                self.dropped += len(batch)
                if self._ends_if_refused and isinstance(error, BusError):
                    raise
                logger.warning("the bus refused records of this run", exc_info=True)
            else:
                self._remove(batch)
        self._empty.set()

    def _remove(self, batch: Sequence[Outgoing]) -> None:
        # The queue may have dropped some of these meanwhile, from the same end.
        taken = set(map(id, batch))
        while self._queue and id(self._queue[0]) in taken:
            self._queue.popleft()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all events are acknowledged (or given up); False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
