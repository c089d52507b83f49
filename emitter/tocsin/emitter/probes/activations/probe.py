"""Which steps' activations are looked at, and what they said, as the collections want it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from tocsin.emitter.plan.collections import AnyOf, CollectionPlan, Schedule
from tocsin.emitter.plan.schedule import CaptureSchedule
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.statistics.tables import Pending, Table
from tocsin.schemas.records.collections import Kind, Mode

ACTIVATIONS: Final[Kind] = "activations"


class ActivationProbe:
    """Has the activations looked at in the steps at which a collection of them is due.

    In another mode than train these are its batches.
    """

    def __init__(
        self,
        schedule: CaptureSchedule,
        isolation: Isolation,
        plans: Sequence[CollectionPlan],
        mode: Mode = "train",
    ) -> None:
        """`plans` are the collections that are made of activations."""
        self._schedule = schedule
        self._isolation = isolation
        self._mode: Mode = mode
        on = tuple(plan for plan in plans if plan.schedule(mode) is not None)
        self.on: Final = bool(on)
        """Whether there is any."""
        # What any of them selects is found once, not anew for each set of them that is due.
        self._selection = AnyOf(on) if any(not plan.everything for plan in on) else None
        self._first = tuple(plan for plan in on if _regular(plan.schedule(mode)))
        self._due: tuple[CollectionPlan, ...] = ()
        self._missed: tuple[CollectionPlan, ...] = ()
        self._spent_s = 0.0

    def drain(self) -> tuple[str, Pending] | None:
        """What the step that is over has said, with the collection that it was looked at for."""
        if not activations.armed or activations.mode != self._mode:
            return None
        due, isolation = self._due, self._isolation
        seen = isolation.run(ACTIVATIONS, activations.drain)
        each_s = (isolation.spent.get(ACTIVATIONS, 0.0) - self._spent_s) / max(1, len(due))
        for plan in due:
            self._schedule.spent(plan.name, each_s)
        if activations.blind:
            isolation.switch_off(ACTIVATIONS, activations.reason)
        if seen is None or not due:
            return None
        if self._selection is None:
            return due[0].name, ChosenActivations(seen, due)
        return due[0].name, ChosenActivations(seen, due, activations.types, activations.picked)

    def prepare(
        self, step: int, root: nn.Module | None, also: tuple[CollectionPlan, ...] = ()
    ) -> bool:
        """Have that step looked at, if something is due, or `also`; whether it is."""
        due = self._schedule.due(step).get(ACTIVATIONS, ())
        # The second step always is: a training of a few steps has said something, too.
        if step == 1 and self._mode == "train":
            also = self._first
        if also or self._missed:
            due = tuple(dict.fromkeys((*due, *also, *self._missed)))
            self._missed = ()
        if not due:
            return False
        self._due = due
        return self.prepare_again(root)

    def prepare_again(self, root: nn.Module | None) -> bool:
        """Something else was looked at since: go back to what was prepared."""
        self._spent_s = self._isolation.spent.get(ACTIVATIONS, 0.0)
        arm, selection = activations.arm, self._selection
        return self._isolation.run(ACTIVATIONS, arm, root, selection, mode=self._mode) or False

    def postpone(self) -> None:
        """Something else was looked at instead: what was prepared is due at the next step."""
        self._missed = self._due


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
        """The tables of each collection."""
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
