"""A data source over records that a test has made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from support.records.issues import runs_view
from tocsin.actions.decision.stop_policy import StopPolicy
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView
from tocsin.store.errors import UnknownRun
from tocsin.store.run import Run

T = TypeVar("T")


class MadeSource:
    """Runs, issues and deliveries, and the numbers of the runs in `opened`."""

    def __init__(
        self,
        *data: Data,
        commands: Mapping[str, CommandSeen] | None = None,
        opened: Mapping[str, Run] | None = None,
        policy: StopPolicy | None = None,
    ) -> None:
        self.known = runs_view(*data)
        self.prices = PricesConfig()
        self.policy = policy
        self._commands = commands or {}
        self._opened = opened or {}

    async def view(self, run_id: str | None = None) -> RunsView:
        return self.known

    async def archived(self) -> Collection[str]:
        return ()

    async def commands(self, run_id: str) -> Mapping[str, CommandSeen]:
        return self._commands

    async def read(self, run_id: str, incarnation: str | None, work: Callable[[Run], T]) -> T:
        if run_id not in self._opened:
            raise UnknownRun(run_id, ["a test"])
        return await asyncio.to_thread(work, self._opened[run_id])
