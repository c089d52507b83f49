"""Where the answers come from: what the API needs to know of a bus and a store.

The page and the agents' tools read through it, too. `tocsin.console.api.bus_source` is the one over
a real bus and store; who follows a bus already may give another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView

if TYPE_CHECKING:
    from tocsin.actions.decision.stop_policy import StopPolicy
    from tocsin.store.run import Run

T = TypeVar("T")


class DataSource(Protocol):
    """A bus and a store together. All methods are coroutines of one event loop; none blocks it.

    Each raises BusUnavailable while the bus does not answer, UnusableBus and UnknownTopic if it was
    never set up.
    """

    @property
    def prices(self) -> PricesConfig:
        """For estimates of what stops have saved."""
        ...

    @property
    def policy(self) -> StopPolicy | None:
        """Which target may end which job; None: no targets are configured."""
        ...

    async def view(self, run_id: str | None = None) -> RunsView:
        """What is known now of all runs, or at least of that one: of the bus and the store; and
        what workers refuse.

        The view may be a live one: use it before the next await.
        """
        ...

    async def archived(self) -> Collection[str]:
        """The runs that are in the store."""
        ...

    async def commands(self, run_id: str) -> Mapping[str, CommandSeen]:
        """The stop commands to a run by command id, unverified: they explain its stop."""
        ...

    async def read(self, run_id: str, incarnation: str | None, work: Callable[[Run], T]) -> T:
        """What `work` makes of the run with all its numbers. It is called in a thread.

        Raises:
            UnknownRun: neither the store nor the bus has numbers of it. What `work` raises.
        """
        ...
