"""Which steps' activations are read, and the tables of them that the collections ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final

from tocsin.emitter.plan.collections import AnyOf, CollectionPlan, Schedule
from tocsin.emitter.plan.schedule import CaptureSchedule, Due
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.tables import Pending, Table
from tocsin.schemas.records.collections import Kind, Mode

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training

ACTIVATIONS: Final[Kind] = "activations"


class ActivationProbe(Probe):
    """Reads the activations of the steps at which a collection of them is due.

    In the second step it reads all that have an interval: a training of a few steps has sent
    something, too.
    """

    name = ACTIVATIONS
    of = ACTIVATIONS

    def __init__(self, mode: Mode = "train", schedule: CaptureSchedule | None = None) -> None:
        """In another mode than train, the steps are the batches of that `schedule`."""
        self._mode: Final[Mode] = mode
        self._own: Final = schedule
        self._due: tuple[CollectionPlan, ...] = ()
        self._missed: tuple[CollectionPlan, ...] = ()
        self._spent_s = 0.0

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self._isolation, self._optimizers = training.isolation, optimizers
        self._schedule = training.schedule if self._own is None else self._own
        plans = training.settings.plans_of(ACTIVATIONS)
        on = tuple(plan for plan in plans if plan.schedule(self._mode) is not None)
        self.on = bool(on)
        # What any of them selects is found once, not anew for each set of them that is due.
        self._selection = AnyOf(on) if any(not plan.everything for plan in on) else None
        if self._mode == "train":
            activations.reset()
            activations.holder = self
            self._missed = tuple(plan for plan in on if _regular(plan.schedule(self._mode)))
            self.reads = 1

    def reset(self) -> None:
        """Back to what it was before `start`: another training may begin."""
        activations.reset()

    def prepare(self, step: int, due: Due) -> None:
        """The step before this one is over: get ready for the forward pass of this one."""
        self.arm((*due.get(ACTIVATIONS, ()), *self._missed))
        self._missed = ()
        self.reads = step if activations.armed else NEVER

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> tuple[str, Pending] | None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost."""
        self.reads = 0 if self._missed else NEVER
        return self.drain()

    def arm(self, due: tuple[CollectionPlan, ...]) -> bool:
        """Have the next forward pass read for these collections; whether it will be."""
        if not due:
            return False
        self._due = tuple(dict.fromkeys(due))
        return self.arm_again()

    def arm_again(self) -> bool:
        """An evaluation has had its batches read since: go back to what was armed."""
        if activations.blind:
            self._isolation.switch_off(ACTIVATIONS, activations.reason)
            return False
        self._spent_s = self._isolation.spent.get(ACTIVATIONS, 0.0)
        return activations.arm(self._optimizers.root, self._selection, mode=self._mode)

    def postpone(self) -> None:
        """A batch of an evaluation was read instead: what was armed is due at the next step."""
        self._missed, self.reads = self._due, 0

    def drain(self) -> tuple[str, Pending] | None:
        """The tables of the forward pass that was armed, and the name of their collection."""
        if not activations.armed or activations.mode != self._mode:
            return None
        due, isolation = self._due, self._isolation
        began = perf_counter()
        found = activations.drain()
        spent_s = isolation.spent.get(ACTIVATIONS, 0.0) - self._spent_s + perf_counter() - began
        for plan in due:
            self._schedule.spent(plan.name, spent_s / len(due))
        if activations.blind:
            isolation.switch_off(ACTIVATIONS, activations.reason)
        if found is None or not due:
            return None
        if self._selection is None:
            return due[0].name, SelectedActivations(found, due)
        return due[0].name, SelectedActivations(found, due, activations.types, activations.picked)


def _regular(schedule: Schedule | None) -> bool:
    """Whether it is one from the first step on."""
    return schedule is not None and not schedule.steps and schedule.start == 0


@dataclass(frozen=True, slots=True, eq=False)
class SelectedActivations:
    """A `Pending`. `types` is the class of each module by its name, `picked` those that only a
    collection of the user's own reads.

    Such a collection has the rows of the modules that it selects; the tables of attention, routers,
    logits and embeddings come with the collection of all activations alone.
    """

    found: Pending
    plans: Sequence[CollectionPlan]
    types: Mapping[str, str] = field(default_factory=dict)
    picked: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether all is on the host; never waits."""
        return self.found.ready

    def tables(self) -> Iterator[Table]:
        """The tables of each collection."""
        for table in self.found.tables():
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
