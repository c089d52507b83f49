"""The data source over a real bus and the store beside it, for servers that live for long.

The bus is read once; each request reads what has come since. Of few runs the numbers are kept, so
that a page which asks for one series after the other does not read the telemetry each time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from tocsin.bus.port import EARLIEST, Bus, BusError, MissingBus, Reader
from tocsin.bus.reading import read_to_end
from tocsin.console.run_lookup import run_of
from tocsin.console.views.bus_view import read_commands, view_partitions, workers_partition
from tocsin.console.views.status import target_policy
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView
from tocsin.schemas.topics import Topics

if TYPE_CHECKING:
    from tocsin.actions.decision.stop_policy import StopPolicy
    from tocsin.console.context import CommandContext
    from tocsin.store.catalog import Store
    from tocsin.store.run import Run
    from tocsin.store.values import StoredRun

T = TypeVar("T")

KEPT_RUNS: Final = 4
"""Of so many runs the numbers are kept in memory."""

MAX_KEPT: Final = 20_000
"""Runs, issues and deliveries that are kept, each; the oldest are left out first."""

_STORED_S: Final = 15.0
"""How old the list of the store's runs may be."""


@dataclass(slots=True)
class _Opened:
    """A run whose numbers are kept; one thread at a time."""

    run: Run | None = None
    lock: Lock = field(default_factory=Lock)


class BusSource:
    """A `DataSource` over a bus that is opened by `async with`.

    Args:
        make_bus: makes the bus, still to be entered.
        open_run: opens a run of the bus and the store by its id and incarnation; may block.
        stored: lists the runs of the store; may block.
        fold_stored: adds to a view what the store has of the events of some runs; may block.
    """

    def __init__(
        self,
        make_bus: Callable[[], Bus],
        topics: Topics,
        *,
        open_run: Callable[[str, str | None], Run],
        stored: Callable[[], Sequence[StoredRun]],
        fold_stored: Callable[[RunsView, Sequence[str]], None],
        prices: PricesConfig,
        policy: StopPolicy | None = None,
    ) -> None:
        self._make_bus = make_bus
        self._topics = topics
        self._open_run = open_run
        self._list_stored = stored
        self._fold_stored = fold_stored
        self._prices = prices
        self._policy = policy
        self._bus: Bus | None = None
        self._reader: Reader | None = None
        self._turn = asyncio.Lock()
        self._view = RunsView(limit=MAX_KEPT)
        self._stored: Mapping[str, StoredRun] = {}
        self._stored_s = -_STORED_S
        self._opened: OrderedDict[tuple[str, str | None], _Opened] = OrderedDict()

    async def __aenter__(self) -> Self:
        """Open the bus. Raises UnusableBus, BusUnavailable; not if there is only a store."""
        try:
            await self._open()
        except MissingBus:
            if not await asyncio.to_thread(self._list_stored):
                raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._let_go()
        if self._bus is not None:
            await self._bus.__aexit__(exc_type, exc, traceback)

    @property
    def prices(self) -> PricesConfig:
        """As `DataSource.prices`."""
        return self._prices

    @property
    def policy(self) -> StopPolicy | None:
        """As `DataSource.policy`."""
        return self._policy

    async def view(self, run_id: str | None = None) -> RunsView:
        """As `DataSource.view`."""
        async with self._turn:
            await self._catch_up()
            await self._list()
            return self._view

    async def archived(self) -> Collection[str]:
        """As `DataSource.archived`."""
        async with self._turn:
            await self._list()
            return self._stored.keys()

    async def commands(self, run_id: str) -> Mapping[str, CommandSeen]:
        """As `DataSource.commands`."""
        return {} if self._bus is None else await read_commands(self._bus, self._topics, run_id)

    async def read(self, run_id: str, incarnation: str | None, work: Callable[[Run], T]) -> T:
        """As `DataSource.read`."""
        key = (run_id, incarnation)
        opened = self._opened.setdefault(key, _Opened())
        self._opened.move_to_end(key)
        while len(self._opened) > KEPT_RUNS:
            self._opened.popitem(last=False)

        def locked() -> T:
            with opened.lock:
                if opened.run is None:
                    opened.run = self._open_run(run_id, incarnation)
                else:
                    opened.run.refresh()
                return work(opened.run)

        return await asyncio.to_thread(locked)

    async def _catch_up(self) -> None:
        """Read what has come to the bus."""
        if self._bus is None:
            with suppress(MissingBus):  # there is a store, and no run since
                await self._open()
        if self._bus is None:
            return
        partitions = [*view_partitions(self._topics), workers_partition(self._topics)]
        try:
            if self._reader is None:
                # What was known is read again: nobody knows what was missed.
                self._view, self._stored = RunsView(limit=MAX_KEPT), {}
                self._stored_s = -_STORED_S
                self._reader = await self._bus.reader(dict.fromkeys(partitions, EARLIEST))
            ends = await self._reader.ends(partitions)
            async for records in read_to_end(self._reader, ends):
                for record in records:
                    self._view.apply(record)
        except BusError:
            await self._let_go()
            raise

    async def _list(self) -> None:
        """Add the runs that only the store has, with their issues and deliveries."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._stored_s < _STORED_S:
            return
        found = {run.run_id: run for run in await asyncio.to_thread(self._list_stored)}
        new = [name for name, run in found.items() if self._stored.get(name) != run]
        away = [name for name in new if self._view.run(name) is None or self._bus is None]
        if away:
            stored = RunsView()
            await asyncio.to_thread(self._fold_stored, stored, away)
            self._view.fold(stored)
            for name in away:
                if self._view.run(name) is None:
                    self._view.add(view_of(found[name]))
        self._stored, self._stored_s = found, now_s

    async def _open(self) -> None:
        bus = self._make_bus()
        self._bus = await bus.__aenter__()

    async def _let_go(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()


def view_of(run: StoredRun) -> RunView:
    """A run as far as its manifest describes it."""
    incarnation = run.incarnations[-1] if run.incarnations else ""
    return RunView.model_validate(
        {
            "run_id": run.run_id,
            "incarnation": incarnation,
            "state": run.state or "ended",
            "outcome": run.outcome or None,
            "labels": run.labels,
            "started_ms": run.started_ms,
            "ended_ms": run.ended_ms,
            "last_step": run.last_step,
        }
    )


def source_of(context: CommandContext, store: Store | None) -> BusSource:
    """The bus that a command was given, and a store; still to be entered.

    Raises:
        ConfigurationError: the bus cannot be what it is configured as.
        MissingExtra: what reads it is not installed.
    """
    from tocsin.store.query.stored_facts import fold_stored

    def fold(view: RunsView, runs: Sequence[str]) -> None:
        if store is not None:
            fold_stored(store, view, context.topics, runs)

    def stored() -> Sequence[StoredRun]:
        return () if store is None else store.runs()

    return BusSource(
        partial(context.open_bus, create=False),
        context.topics,
        open_run=partial(run_of, context, store),
        stored=stored,
        fold_stored=fold,
        prices=context.config.prices,
        policy=target_policy(context),
    )
