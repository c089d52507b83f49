"""`/api/v1` over what the page has already: its state of the bus, and the runs it keeps open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeVar

from tocsin.bus.port import BusUnavailable
from tocsin.console.page.numbers import Numbers
from tocsin.console.page.stored import StoredRuns
from tocsin.console.watch.follower import Follower
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView

if TYPE_CHECKING:
    from tocsin.actions.decision.stop_policy import StopPolicy
    from tocsin.store import Run

T = TypeVar("T")


class LiveSource:
    """The `DataSource` of a running page; see there for what its methods mean.

    Of a bus that is away it gives what was read last, as the page does, unless nothing was.
    """

    def __init__(
        self,
        caught_up: Callable[[], Awaitable[None]],
        follower: Follower,
        numbers: Numbers,
        stored: StoredRuns,
        prices: PricesConfig,
        policy: StopPolicy | None,
    ) -> None:
        self._caught_up = caught_up
        self._follower = follower
        self._numbers = numbers
        self._stored = stored
        self._prices = prices
        self._policy = policy

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
        await self._caught_up()
        view = self._follower.state.view
        trouble = self._follower.situation(unix_ms()).trouble
        if trouble is not None and not view.seen:
            raise BusUnavailable(trouble)
        return view

    async def archived(self) -> Collection[str]:
        """As `DataSource.archived`."""
        return self._stored.names

    async def commands(self, run_id: str) -> Mapping[str, CommandSeen]:
        """As `DataSource.commands`."""
        found = self._follower.state.view.commands
        return {key: seen for key, seen in found.items() if seen.command.run_id == run_id}

    async def read(self, run_id: str, incarnation: str | None, work: Callable[[Run], T]) -> T:
        """As `DataSource.read`."""
        return await asyncio.to_thread(self._numbers.read_known, run_id, incarnation, work)
