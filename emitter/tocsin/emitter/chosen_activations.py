"""What a step's modules said, as the collections want it that were due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.emitter.plans import CollectionPlan
from tocsin.emitter.tables import Pending, Table

ACTIVATIONS: Final = "activations"


@dataclass(frozen=True, slots=True, eq=False)
class ChosenActivations:
    """A `Pending`. `types` is the class of each module by its name.

    A collection of the user's own has the rows of the modules that it selects; what attention,
    routers, logits and embeddings say comes with the collection of all activations alone.
    """

    said: Pending
    plans: Sequence[CollectionPlan]
    types: Mapping[str, str]

    @property
    def ready(self) -> bool:
        """Whether all is on the host; never waits."""
        return self.said.ready

    def tables(self) -> Iterator[Table]:
        """Those of each collection."""
        for table in self.said.tables():
            for plan in self.plans:
                if table.collection == ACTIVATIONS:
                    yield _chosen(table, plan, self.types)
                elif plan.everything:
                    yield table


def _chosen(table: Table, plan: CollectionPlan, types: Mapping[str, str]) -> Table:
    # A module that is called several times has rows NAME, NAME#2, …
    names = [name.partition("#")[0] for name in table.names]
    rows = [i for i, name in enumerate(names) if plan.selects(name, types.get(name))]
    wanted = table.columns if plan.columns is None else plan.columns
    at = [i for i, column in enumerate(table.columns) if column in wanted]
    return Table(
        plan.name,
        tuple(table.names[i] for i in rows),
        table.values[rows][:, at],
        table.counts[rows],
        tuple(table.columns[i] for i in at),
        table.count_columns,
    )
