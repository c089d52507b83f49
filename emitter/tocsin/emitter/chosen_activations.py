"""Which steps' activations are looked at, and what they said, as the collections want it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from tocsin.emitter.activations import activations
from tocsin.emitter.agenda import Agenda
from tocsin.emitter.plans import AnyOf, CollectionPlan, Schedule
from tocsin.emitter.tables import Pending, Table
from tocsin.emitter.wall import Wall

ACTIVATIONS: Final = "activations"


class ActivationProbe:
    """Has the activations looked at in the steps at which a collection of them is due."""

    def __init__(self, agenda: Agenda, wall: Wall, plans: Sequence[CollectionPlan]) -> None:
        """`plans` are the collections that are made of activations."""
        self._agenda = agenda
        self._wall = wall
        on = tuple(plan for plan in plans if plan.schedule() is not None)
        # What any of them selects is found once, not anew for each set of them that is due.
        self._selection = AnyOf(on) if any(not plan.everything for plan in on) else None
        self._first = tuple(plan for plan in on if _regular(plan.schedule()))
        self._due: tuple[CollectionPlan, ...] = ()
        self._spent_s = 0.0

    def take(self) -> tuple[str, Pending] | None:
        """What the step that is over has said, with the collection that it was looked at for."""
        if not activations.armed:
            return None
        due, wall = self._due, self._wall
        seen = wall.call(ACTIVATIONS, activations.take)
        each_s = (wall.spent.get(ACTIVATIONS, 0.0) - self._spent_s) / max(1, len(due))
        for plan in due:
            self._agenda.spent(plan.name, each_s)
        if activations.blind:
            wall.switch_off(ACTIVATIONS, activations.reason)
        if seen is None or not due:
            return None
        if self._selection is None:
            return due[0].name, ChosenActivations(seen, due)
        return due[0].name, ChosenActivations(seen, due, activations.types, activations.picked)

    def prepare(self, step: int, root: nn.Module | None) -> None:
        """Have that step looked at, if something is due."""
        due = self._agenda.due(step).get("activations", ())
        # The second step always is: a training of a few steps has said something, too.
        if step == 1:
            due = tuple(dict.fromkeys((*due, *self._first)))
        if due:
            self._due = due
            self._spent_s = self._wall.spent.get(ACTIVATIONS, 0.0)
            self._wall.call(ACTIVATIONS, activations.arm, root, self._selection)


def _regular(schedule: Schedule | None) -> bool:
    """Whether it is one from the first step on."""
    return schedule is not None and not schedule.steps and schedule.start == 0


@dataclass(frozen=True, slots=True, eq=False)
class ChosenActivations:
    """A `Pending`. `types` is the class of each module by its name, `picked` those that only a
    collection of the user's own has looked at.

    Such a collection has the rows of the modules that it selects; what attention,
    routers, logits and embeddings say comes with the collection of all activations alone.
    """

    said: Pending
    plans: Sequence[CollectionPlan]
    types: Mapping[str, str] = field(default_factory=dict)
    picked: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether all is on the host; never waits."""
        return self.said.ready

    def tables(self) -> Iterator[Table]:
        """Those of each collection."""
        for table in self.said.tables():
            for plan in self.plans:
                if table.collection == ACTIVATIONS:
                    yield self._chosen(table, plan)
                elif plan.everything:
                    yield table

    def _chosen(self, table: Table, plan: CollectionPlan) -> Table:
        # A module that is called several times has rows NAME, NAME#2, …
        names = [name.partition("#")[0] for name in table.names]
        rows = [i for i, name in enumerate(names) if self._belongs(name, plan)]
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

    def _belongs(self, name: str, plan: CollectionPlan) -> bool:
        if plan.everything:
            return name not in self.picked
        return plan.picks(name, self.types.get(name))
