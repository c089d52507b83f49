"""Which tensors are summarised at which steps: the plan of each collection.

Values alone, without torch, NumPy and pydantic; `tocsin.emitter.process.environment` makes them of
what the environment holds, and the capture asks them on the training's own thread.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from tocsin.schemas.records.collections import MODES, Kind, Mode

PREDICT: Final = "predict"
"""The phase in which losses are those of predictions, and of no evaluation."""

FLOOR: Final[Mapping[Kind, int]] = {
    "gradients": 10,
    "weights": 10,
    "activations": 100,
    "optimizer_state": 100,
    "inputs": 100,
    "biases": 10,
}
"""Steps between two summaries where the budget decides and has nothing against it.

Losses have none: they are scalars of each step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which a collection is summarised in one mode.

    In evaluations and predictions activations and inputs count batches in the place of steps: all
    of that mode since the training began, from 0.

    Attributes:
        every: steps between two summaries, counted from `start`; None: the budget decides, unless
            there are explicit steps.
        start: the first step.
        end: the first step that is not captured any more; None: never.
        steps: explicit steps, which count whatever the others are.
    """

    every: int | None = None
    start: int = 0
    end: int | None = None
    steps: frozenset[int] = frozenset()

    @property
    def automatic(self) -> bool:
        """Whether the budget decides the interval."""
        return self.every is None and not self.steps

    @property
    def regular(self) -> bool:
        """Whether it has an interval at all, not explicit steps alone."""
        return self.every is not None or not self.steps

    def due(self, step: int, interval: int) -> bool:
        """Whether this step is summarised; `interval` (1 or more) is what the budget allows."""
        if step in self.steps:
            return True
        every = self.every
        if every is None:
            if self.steps:
                return False
            every = interval
        if step < self.start or (self.end is not None and step >= self.end):
            return False
        return (step - self.start) % every == 0

    def following(self, step: int, interval: int) -> int:
        """The first due step after this one; `sys.maxsize` if there is none."""
        listed = [later for later in self.steps if later > step]
        every = self.every if self.every is not None or self.steps else interval
        if every is not None:
            after = max(step + 1, self.start)
            regular = after + (self.start - after) % every
            if self.end is None or regular < self.end:
                listed.append(regular)
        return min(listed, default=sys.maxsize)


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """What one collection holds, and when.

    Attributes:
        name: its name, which its frames carry.
        of: what it is made of.
        schedules: for each of the four modes when it is summarised; None: never.
        columns: those that it has; None: all of its kind.
        match: patterns one of which is found in the tensor's name.
        module_types: class names of the modules whose tensors belong to it.
        tensors: names of tensors that belong to it. With no pattern, type and name, all do.
        saves: steps of training at which its tensors are saved in full.
    """

    name: str
    of: Kind
    schedules: Mapping[Mode, Schedule | None] = field(hash=False)
    columns: tuple[str, ...] | None = None
    match: tuple[re.Pattern[str], ...] = ()
    module_types: tuple[str, ...] = ()
    tensors: frozenset[str] = frozenset()
    saves: frozenset[int] = frozenset()

    @property
    def on(self) -> bool:
        """Whether it is captured in any mode."""
        return any(schedule is not None for schedule in self.schedules.values())

    @property
    def everything(self) -> bool:
        """Whether each tensor of its kind belongs to it."""
        return not (self.match or self.module_types or self.tensors)

    @property
    def floor(self) -> int:
        """The shortest interval that the budget may choose, in steps."""
        return FLOOR.get(self.of, 1)

    def counts_batches(self, mode: Mode) -> bool:
        """Whether what its schedule calls steps are batches of that mode."""
        return mode != "train" and self.of != "losses"

    def schedule(self, mode: Mode = "train") -> Schedule | None:
        """When it is summarised in that mode; None: never."""
        return self.schedules.get(mode)

    def selects(self, name: str, module_type: str | None = None) -> bool:
        """Whether a tensor belongs to it, by its name and the class name of its module.

        A name is like `blocks.0.mlp.weight`. Any one of the patterns, types and names will do. Ask
        once for each tensor, not once a step.
        """
        return self.everything or self.picks(name, module_type)

    def picks(self, name: str, module_type: str | None = None) -> bool:
        """Whether it selects by a pattern, a type or a name."""
        return (
            name in self.tensors
            or module_type in self.module_types
            or any(pattern.search(name) for pattern in self.match)
        )


class Selection(Protocol):
    """Which tensors belong to one collection, or to any of several."""

    @property
    def everything(self) -> bool:
        """Whether each tensor of its kind belongs to it."""
        ...

    def selects(self, name: str, module_type: str | None = None) -> bool:
        """Whether a tensor belongs to it."""
        ...

    def picks(self, name: str, module_type: str | None = None) -> bool:
        """Whether a pattern, a type or a name selects it."""
        ...


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What belongs to any of these collections."""

    plans: tuple[CollectionPlan, ...]

    @property
    def everything(self) -> bool:
        """Whether each tensor of the kind belongs to one."""
        return any(plan.everything for plan in self.plans)

    def selects(self, name: str, module_type: str | None = None) -> bool:
        """Whether a tensor belongs to one."""
        return any(plan.selects(name, module_type) for plan in self.plans)

    def picks(self, name: str, module_type: str | None = None) -> bool:
        """Whether a pattern, a type or a name of one of them selects it."""
        return any(plan.picks(name, module_type) for plan in self.plans)


NEVER: Final[Mapping[Mode, Schedule | None]] = MappingProxyType(dict.fromkeys(MODES))
"""The schedules of a collection that is off."""


def plan_of(name: Kind, *modes: Mode) -> CollectionPlan:
    """The collection of all tensors of a kind, at intervals that the budget decides."""
    when = {mode: Schedule() if mode in modes else None for mode in MODES}
    return CollectionPlan(name, name, MappingProxyType(when))


DEFAULT_PLANS: Final[Mapping[str, CollectionPlan]] = MappingProxyType(
    {
        plan.name: plan
        for plan in (
            plan_of("losses", "train", "eval", "predict"),
            plan_of("gradients", "train"),
            plan_of("weights", "train"),
            plan_of("biases"),
            plan_of("activations", "train"),
            plan_of("inputs"),
            plan_of("optimizer_state", "train"),
        )
    }
)
"""What holds for the collections that the configuration does not name."""
