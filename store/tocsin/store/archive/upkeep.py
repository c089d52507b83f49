"""What a store needs beside new rows: files merged, files sorted, runs deleted. In its own thread.

It works on what is in the store already, so no record waits for it, and a crash costs nothing but
to do it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from tocsin.runtime.clock import Clock, SystemClock
from tocsin.runtime.testing import no_crash
from tocsin.schemas.topics import Topics
from tocsin.store.archive.merge import compact, thin_out, wants_thinning
from tocsin.store.archive.retention import Keep, is_over, make_room
from tocsin.store.catalog import Store
from tocsin.store.errors import StoreError
from tocsin.store.manifest import FAMILIES, Family, Manifest

logger = logging.getLogger(__name__)

SETTLE_MS: Final = 30_000
"""After the last record of a run that is over its files are sorted."""

IDLE_MS: Final = 3_600_000
"""And of a run of which nothing more came for so long."""

SWEEP_MS: Final = 3_600_000
"""How often the whole store is looked through: for runs that are too many, and for work that an
earlier process has left."""

AGAIN_MS: Final = 60_000
"""When what failed is tried again."""


class Upkeep:
    """The work on one store.

    Args:
        keep: how much the store may hold; None: this process deletes nothing.
    """

    def __init__(
        self,
        store: Store,
        *,
        topics: Topics,
        keep: Keep | None = None,
        clock: Clock | None = None,
        crash: Callable[[str], None] = no_crash,
    ) -> None:
        self.keep = keep
        self._store = store
        self._topics = topics
        self._clock = clock or SystemClock()
        self._crash = crash
        self._changed = threading.Condition()
        self._sort_ms: dict[tuple[str, Family], int] = {}
        self._thin: set[tuple[str, Family]] = set()
        self._sweep_ms = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look after the store, until `stop`."""
        self._thread = threading.Thread(target=self._run, name="tocsin-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more. What is under way ends by itself, or with the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def use(self, keep: Keep | None) -> None:
        """From now on the store may hold so much; it is looked through at once. From any thread."""
        with self._changed:
            self.keep = keep
            self._sweep_ms = 0
            self._changed.notify_all()

    def flushed(
        self, run_id: str, family: Family, manifest: Manifest, *, over: bool, now_ms: int
    ) -> None:
        """Rows of a run were written. From any thread."""
        with self._changed:
            self._sort_ms[run_id, family] = now_ms + (SETTLE_MS if over else IDLE_MS)
            if wants_thinning(manifest):
                self._thin.add((run_id, family))
            self._changed.notify_all()

    def run_due(self, now_ms: int) -> None:
        """Do what is due. Blocks; what fails is logged, and tried again later."""
        with self._changed:
            thin = sorted(self._thin)
            sort = [key for key, due_ms in self._sort_ms.items() if due_ms <= now_ms]
            self._thin.clear()
        for run_id, family in thin:
            self._try("merge", run_id, partial(self._thin_out, run_id, family))
        for run_id, family in sort:
            done = self._try("sort", run_id, partial(self._compact, run_id, family))
            with self._changed:
                if done:
                    del self._sort_ms[run_id, family]
                else:
                    self._sort_ms[run_id, family] = now_ms + AGAIN_MS
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + SWEEP_MS
            self._try("keep", "", partial(self._sweep, now_ms))

    def next_ms(self) -> int:
        """When `look` has something to do, at the latest."""
        with self._changed:
            return 0 if self._thin else min([self._sweep_ms, *self._sort_ms.values()])

    def _run(self) -> None:
        while True:
            now_ms = self._clock.now_ms()
            if self.next_ms() <= now_ms:
                self.run_due(now_ms)
            with self._changed:
                if self._stopping:
                    return
                self._changed.wait(max(0.05, (self._due_ms() - self._clock.now_ms()) / 1000))
                if self._stopping:
                    return

    def _due_ms(self) -> int:
        return 0 if self._thin else min([self._sweep_ms, *self._sort_ms.values()])

    def _thin_out(self, run_id: str, family: Family) -> bool:
        thin_out(self._store, run_id, family, topics=self._topics, crash=self._crash)
        return True

    def _compact(self, run_id: str, family: Family) -> bool:
        compact(self._store, run_id, family, topics=self._topics, crash=self._crash)
        return True

    def _sweep(self, now_ms: int) -> bool:
        self._store.storage.tidy(now_ms / 1000)
        for run in self._store.runs():
            if is_over(run, now_ms) and run.updated_ms < now_ms - IDLE_MS:
                # One that is damaged keeps nobody from the others.
                for family in FAMILIES:
                    self._try("sort", run.run_id, partial(self._compact, run.run_id, family))
        if self.keep is not None:
            make_room(self._store, self.keep, now_ms)
        return True

    def _try(self, action: str, run_id: str, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except StoreError as error:
            logger.warning(
                "upkeep of the store failed%s, trying again: %s",
                f" for {run_id}" if run_id else "",
                error,
                extra={"action": action, "run_id": run_id},
            )
            return False
