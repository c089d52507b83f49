"""Ends a worker that is wedged, so that whatever supervises it starts it again.

It is wedged in one of two ways: the event loop or the rule thread hangs, so that no round ends; or
rounds end, but the consumer returns nothing although there is more to read. (A consumer that never
gets into its group again raises FencedMember: see `tocsin.bus.kafka.consumer`.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
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

LAST_WORDS_S: Final = 10.0
"""How long what is to be written before the end may take."""

STUCK_MS: Final = 60_000
"""So long without a record of a partition that has more: several times what a group needs to notice
that a member is gone."""

CHECK_INTERVAL_MS: Final = 20_000
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

    It checks from a thread of its own: a loop that hangs could not. It logs where all threads are.

    Args:
        alive_ms: when the worker was last seen to be alive; None: it has not begun.
        last_words: called before the end, and given 10 s.
        end: ends the process.
    """

    def __init__(
        self,
        alive_ms: Callable[[], int | None],
        *,
        hangs_s: float = HANGS_S,
        last_words: Callable[[], object] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._alive_ms = alive_ms
        self._hangs_s = hangs_s
        self._last_words = last_words
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
        interval_s = min(1.0, self._hangs_s / 4)
        seen, checks = self._alive_ms(), 0
        while not self._over.wait(interval_s):
            now = self._alive_ms()
            # Checks are counted, not seconds: while the process is frozen there are none.
            checks = checks + 1 if now == seen and seen is not None else 0
            seen = now
            if checks * interval_s > self._hangs_s:
                logger.critical(
                    "no round has ended for %.0f s: this worker exits, so that its supervisor "
                    "restarts it. Its threads:\n%s",
                    self._hangs_s,
                    _stacks(),
                    extra={"action": "watchdog"},
                )
                self._write_last_words()
                logging.shutdown()
                self._end(FAILED)
                return

    def _write_last_words(self) -> None:
        if self._last_words is None:
            return
        thread = threading.Thread(target=self._last_words, name="tocsin-last-words", daemon=True)
        thread.start()
        thread.join(LAST_WORDS_S)


def _stacks() -> str:
    """Where each thread of this process is."""
    frames = sys._current_frames()
    return "".join(
        "".join([f"{thread.name}:\n", *traceback.format_stack(frames[thread.ident])])
        for thread in threading.enumerate()
        if thread.ident in frames
    )
