"""Runs that only the store has: those that the bus has forgotten, added to what the page shows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from tocsin.console.api.bus_source import view_of
from tocsin.console.context import CommandContext
from tocsin.console.watch.state import WatchState
from tocsin.schemas.errors import MissingExtra
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.store.errors import StoreError

if TYPE_CHECKING:
    from tocsin.store.catalog import Store
    from tocsin.store.values import StoredRun

logger = logging.getLogger(__name__)

LIST_S: Final = 10.0
"""Least time between two looks into the store."""

AT_ONCE: Final = 200
"""Runs whose events are read together."""

_PAUSES: Final = 20.0
"""After each look a pause of so many times its duration."""


class StoredRuns:
    """The runs of a store, kept in the state of the page.

    Args:
        state: the state as it is now; another one after the bus was away.
        changed: called when runs were added.
    """

    def __init__(
        self,
        context: CommandContext,
        store: Store | None,
        state: Callable[[], WatchState],
        changed: Callable[[], None],
    ) -> None:
        self._topics = context.topics
        self._store = store
        self._state = state
        self._changed = changed
        self._known: Mapping[str, StoredRun] = {}
        # Of the view the runs that came from here: those of the bus it knows better.
        self._added: set[str] = set()
        self._added_to: WatchState | None = None

    @property
    def names(self) -> Collection[str]:
        """The runs that are in the store."""
        return self._known.keys()

    async def run(self) -> None:
        """Look into the store again and again; return if there is none."""
        while self._store is not None:
            started_s = time.monotonic()
            await self.read_once()
            took_s = time.monotonic() - started_s
            await asyncio.sleep(max(LIST_S, _PAUSES * took_s))

    async def read_once(self) -> None:
        """Add the runs of the store that are not known, or have changed; the newest first."""
        found = await asyncio.to_thread(self._list)
        if self._state() is not self._added_to:
            self._known, self._added = {}, set()
        self._added_to = state = self._state()
        new = [
            name
            for name, run in found.items()
            if self._known.get(name) != run
            and (state.view.run(name) is None or name in self._added)
        ]
        self._added.update(new)
        self._known = found
        for start in range(0, len(new), AT_ONCE):
            names = new[start : start + AT_ONCE]
            view = await asyncio.to_thread(self._events_of, names)
            # What the manifests say, where the events are not readable.
            for name in names:
                if view.run(name) is None:
                    view.add(view_of(found[name]))
            state.fold(view)
            self._changed()

    def _list(self) -> Mapping[str, StoredRun]:
        if self._store is None:
            return {}
        try:
            return {run.run_id: run for run in reversed(self._store.runs())}
        except StoreError as error:
            logger.warning("the store cannot be read: %s", error, extra={"action": "store"})
            return self._known

    def _events_of(self, names: Sequence[str]) -> RunsView:
        from tocsin.store.query.stored_facts import fold_stored

        view = RunsView()
        if self._store is None:
            return view
        try:
            fold_stored(self._store, view, self._topics, names)
        except (StoreError, MissingExtra) as error:
            logger.warning("stored runs cannot be read: %s", error, extra={"action": "store"})
        return view
