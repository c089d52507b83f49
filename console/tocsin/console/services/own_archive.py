"""The archive of one run, in its helper: what is on the bus goes into files now and then, and when
the run is over.

It never keeps the helper from its work: whatever fails here is a line in its log, and stays on the
bus for the next helper or `tocsin archive`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable
from typing import Final

from tocsin.bus.port import Bus, BusError
from tocsin.console.context import CommandContext
from tocsin.runtime.testing import no_crash
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

FINISH_S: Final = 2.5
"""How long the end of a helper waits for the last files. What does not get ready is done later."""

NOT_INSTALLED: Final = (
    "runs are not archived: the extra 'store' is not installed; "
    "in the clone that you installed from, run: pip install '.[store]', or set `store: off`"
)


def installed() -> bool:
    """Whether what writes files is there."""
    return importlib.util.find_spec("duckdb") is not None


class OwnArchive:
    """Archives one run of an embedded bus, if the configuration wants it."""

    def __init__(
        self,
        bus: Bus,
        context: CommandContext,
        run_id: str,
        *,
        crash: Callable[[str], None] = no_crash,
    ) -> None:
        self._bus = bus
        self._context = context
        self._run_id = run_id
        self._crash = crash
        self._every_s = context.settings.store.every.total_seconds()
        self._enabled = context.settings.store.enabled
        if self._enabled and not installed():
            self._enabled = False
            logger.info("%s", NOT_INSTALLED, extra={"action": "archive"})
        self._lock = asyncio.Lock()
        self._failed = False

    async def run(self) -> None:
        """Archive in intervals, until it is cancelled; once also what earlier runs have left."""
        first = True
        while self._enabled:
            await asyncio.sleep(self._every_s)
            await self._archive(over=False, others=first)
            first = False

    async def finish(self) -> None:
        """Archive the rest, in `FINISH_S` at most."""
        if not self._enabled:
            return
        try:
            async with asyncio.timeout(FINISH_S):
                await self._archive(over=True)
        except TimeoutError:
            logger.warning(
                "the run is not archived to its end yet; a later run or `tocsin archive` does it",
                extra={"action": "archive"},
            )

    async def _archive(self, *, over: bool, others: bool = False) -> None:
        # What it imports is not paid by runs that archive nothing.
        from tocsin.store.archive.once import archive_run, finish_others
        from tocsin.store.archive.retention import make_room
        from tocsin.store.configured import keep_of

        topics: Topics = self._context.topics
        try:
            async with self._lock:
                store = self._context.open_store()
                done = await archive_run(
                    self._bus,
                    store,
                    self._run_id,
                    topics=topics,
                    now_ms=unix_ms,
                    over=over,
                    crash=self._crash,
                )
                keep = keep_of(self._context.settings.store)
                if others:
                    await finish_others(
                        self._bus, store, topics=topics, now_ms=unix_ms, held=self._held
                    )
                if over or others:
                    await asyncio.to_thread(store.storage.tidy, unix_ms() / 1000)
                if over and keep is not None:
                    await asyncio.to_thread(make_room, store, keep, unix_ms())
        except (TocsinError, BusError, OSError) as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            logger.log(
                level,
                "the run is not archived for now; it stays on the bus: %s",
                error,
                extra={"action": "archive"},
            )
            return
        if self._failed:
            self._failed = False
            logger.info("the run is archived again", extra={"action": "archive"})
        logger.debug("archived %d rows", done.rows, extra={"action": "archive"})

    async def _held(self, run_id: str) -> bool:
        from tocsin.console.services.workers import run_lease

        return await self._bus.leased(run_lease(run_id))
