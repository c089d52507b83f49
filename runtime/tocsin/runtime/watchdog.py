"""Ends a worker that is wedged, so that whatever supervises it starts it again.

It is wedged in one of two ways: the event loop or the rule thread hangs, so that no round ends; or
rounds end, but the consumer returns nothing although there is more to read (seen of clients whose
broker was restarted: they never join their group again, and nobody tells).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.bus.port import Partition
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.exit_codes import FAILED

logger = logging.getLogger(__name__)

HANGS_S: Final = 120.0
"""Without the end of a round, or of a try to reach the bus, a worker hangs. A round may take a
checkpoint of 10 s and a restore of many partitions."""

STUCK_MS: Final = 60_000
"""So long without a record of a partition that has more: several times what a group needs to notice
that a member is gone."""

LOOK_MS: Final = 20_000
"""How often a silent consumer's ends are asked for."""


class WedgedConsumer(TocsinError):
    """There is more to read, and for a long time nothing came."""


@dataclass(slots=True)
class Progress:
    """Whether what was read moves on. Pure: time comes in as a value."""

    stuck_ms: int = STUCK_MS
    _since: dict[Partition, tuple[int, int]] = field(default_factory=dict)

    def observe(
        self, positions: Mapping[Partition, int], ends: Mapping[Partition, int], now_ms: int
    ) -> Partition | None:
        """The partition that has more and has not moved for `stuck_ms`; None: there is none."""
        since: dict[Partition, tuple[int, int]] = {}
        stuck: Partition | None = None
        for partition, position in positions.items():
            if ends.get(partition, 0) <= position:
                continue
            known, from_ms = self._since.get(partition, (position, now_ms))
            since[partition] = (position, from_ms if known == position else now_ms)
            if now_ms - since[partition][1] >= self.stuck_ms:
                stuck = partition
        self._since = since
        return stuck


class Watchdog:
    """Ends the process if a worker hangs. A part of a service (`tocsin.runtime.shutdown.Part`).

    It looks from a thread of its own: a loop that hangs could not.

    Args:
        alive_ms: when the worker was last seen to be alive; None: it has not begun.
        end: ends the process.
    """

    def __init__(
        self,
        alive_ms: Callable[[], int | None],
        *,
        hangs_s: float = HANGS_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._alive_ms = alive_ms
        self._hangs_s = hangs_s
        self._end = end
        self._over = threading.Event()
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Watch until `stop`."""
        thread = threading.Thread(target=self._watch, name="tocsin-watchdog", daemon=True)
        thread.start()
        await self._done.wait()

    def stop(self) -> None:
        """Ask `run` to return. The end of a service has budgets of its own."""
        self._over.set()
        self._done.set()

    def _watch(self) -> None:
        seen, since_s = self._alive_ms(), time.monotonic()
        while not self._over.wait(min(1.0, self._hangs_s / 4)):
            now = self._alive_ms()
            if now != seen:
                seen, since_s = now, time.monotonic()
            elif seen is not None and time.monotonic() - since_s > self._hangs_s:
                logger.critical(
                    "no round has ended for %.0f s: this worker ends, to be started again",
                    self._hangs_s,
                    extra={"action": "watchdog"},
                )
                logging.shutdown()
                self._end(FAILED)
                return
