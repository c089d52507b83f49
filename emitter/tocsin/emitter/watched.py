"""The optimizers of a training: which of them counts the steps, and what their parameters are
called.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from tocsin.emitter import models
from tocsin.emitter.plans import CollectionPlan
from tocsin.emitter.shards import base_name, place_of

PRIMARY_PATIENCE: Final = 10
"""Steps that another optimizer makes while the primary makes none, before it takes its place."""

_MAX_KNOWN: Final = 1000

_MAX_LOOKS: Final = 20
"""How often a training's modules are looked for, which takes some 50 ms; parameters that come up
later are named after their optimizer.
"""


@dataclass(slots=True, eq=False)
class Watched:
    """One optimizer and the names of its parameters, in forward order."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    size: int
    parameters: list[tuple[str, torch.Tensor]]
    steps: int = 0
    chosen: dict[str, frozenset[str]] = field(default_factory=dict)
    parts: dict[str, int] | None = None
    """In how many parts over the ranks each parameter is cut; None where all are whole here."""


class Optimizers:
    """Those of one training.

    `preferred` is the one that the user has named the main one; `used` are those of trainings
    before, which have no part in this one unless they step.
    """

    def __init__(
        self,
        first: torch.optim.Optimizer,
        preferred: torch.optim.Optimizer | None = None,
        used: Collection[torch.optim.Optimizer] = (),
    ) -> None:
        self._looks = 0
        self._dead: list[tuple[int, Watched, list[int]]] = []
        found = self._look()
        self._root: weakref.ref[nn.Module] | None = None
        self._names: dict[int, str] = {}
        self._types: dict[str, str] = {}
        alive = [o for o in found.optimizers if models.hooked(o) and o not in used]
        if not any(o is first for o in alive):
            alive.append(first)
        primary = max(
            alive,
            key=lambda o: (
                o is preferred,
                sum(p.numel() for *_, p in models.parameters_of(o)),
                o is first,
            ),
        )
        self._watched: dict[int, Watched] = {}
        self._others = 0
        self._primary = id(primary)
        for optimizer in (primary, *(o for o in alive if o is not primary)):
            self._watch(optimizer)

    @property
    def count(self) -> int:
        """How many are alive."""
        return len(self._watched) - len(self._dead)

    @property
    def primary(self) -> Watched:
        """The one whose steps count."""
        return self._watched[self._primary]

    def modules(self) -> list[nn.Module]:
        """Those that are alive, as they were found when an optimizer was last new."""
        return [m for m in (ref() for ref in self._modules) if m is not None]

    @property
    def root(self) -> nn.Module | None:
        """The module that holds most of the parameters, while it lives."""
        return None if self._root is None else self._root()

    @property
    def names(self) -> dict[int, str]:
        """The name of each parameter by its id."""
        return self._names

    def is_primary(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its steps count."""
        return id(optimizer) == self._primary

    def alive(self) -> list[torch.optim.Optimizer]:
        """Those that have not gone."""
        found = (watched.optimizer() for watched in self._watched.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of all optimizers, each once."""
        found = {id(p): p for w in self._watched.values() for _, p in w.parameters}
        return list(found.values())

    def of(self, optimizer: torch.optim.Optimizer) -> Watched:
        """What is known of it; looked at anew where it is new or has other parameters."""
        if self._dead:
            self._bury()
        watched = self._watched.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            if watched is None and len(self._watched) > _MAX_KNOWN:
                self._watched = {self._primary: self._watched[self._primary]}
            return self._watch(optimizer, look=True)
        if watched.size != models.size(optimizer):
            steps = watched.steps
            watched = self._watch(optimizer, look=True)
            watched.steps = steps
        return watched

    def counts(self, optimizer: torch.optim.Optimizer, watched: Watched) -> bool:
        """This optimizer has made a step: whether that is a step of the training.

        Where the primary makes none any more, the one that does takes its place.
        """
        watched.steps += 1
        if id(optimizer) != self._primary:
            self._others += 1
            primary = self._watched[self._primary]
            stepping = watched.steps > primary.steps + PRIMARY_PATIENCE
            gone = primary.optimizer() is None
            if not gone and (not stepping or self._others <= PRIMARY_PATIENCE):
                return False
            self._primary = id(optimizer)
        self._others = 0
        return True

    def chosen(self, watched: Watched, plan: CollectionPlan) -> frozenset[str] | None:
        """The names of its parameters that a collection holds; None: all of them."""
        if plan.everything and plan.of != "biases":
            return None
        names = watched.chosen.get(plan.name)
        if names is None:
            names = watched.chosen[plan.name] = frozenset(
                name
                for name, _ in watched.parameters
                if plan.selects(base_name(name), self._types.get(name))
                and (plan.of != "biases" or name.rpartition(".")[2].startswith("bias"))
            )
        return names

    def _bury(self) -> None:
        """Forget the optimizers that are gone, and the names of parameters that were theirs."""
        dead, self._dead = self._dead, []
        alive = {id(p) for w in self._watched.values() for _, p in w.parameters}
        for key, watched, ids in dead:
            if key != self._primary and self._watched.get(key) is watched:
                del self._watched[key]
            for parameter in ids:
                # Another tensor may have that id by now, and would get that name.
                if parameter not in alive:
                    self._names.pop(parameter, None)

    def _look(self) -> models.Found:
        self._looks += 1
        found = models.find()
        self._modules = [weakref.ref(module) for module in found.modules]
        self._stages = found.stages
        return found

    def _watch(self, optimizer: torch.optim.Optimizer, *, look: bool = False) -> Watched:
        entries = models.parameters_of(optimizer)
        parameters = [p for *_, p in entries]
        unknown = [p for p in parameters if id(p) not in self._names]
        order: dict[int, int] = {}
        if unknown:
            if look and self._looks < _MAX_LOOKS:
                self._look()
            live = [m for m in (ref() for ref in self._modules) if m is not None]
            names = models.name_parameters(parameters, live, self._stages)
            order = names.order
            if self._root is None and names.root is not None:
                self._root = weakref.ref(names.root)
            taken = set(self._names.values())
            for group, place, parameter in entries:
                if id(parameter) in self._names:
                    continue
                name = names.by_id.get(id(parameter), f"group{group}.{place}")
                if name in taken:
                    name = f"optimizer{len(self._watched)}.{name}"
                taken.add(name)
                self._names[id(parameter)] = name
            self._types.update(_owners(self._names, live))
        named = [(self._names[id(p)], p) for p in parameters]
        if order:
            last = len(order)
            named.sort(key=lambda pair: order.get(id(pair[1]), last))
        key = id(optimizer)

        def gone(_: weakref.ref[torch.optim.Optimizer]) -> None:
            # The parameters at once: a model that is gone must not stay in memory for us.
            held, watched.parameters = watched.parameters, []
            self._dead.append((key, watched, [id(p) for _, p in held]))

        watched = Watched(weakref.ref(optimizer, gone), len(parameters), named)
        parts = {name: place_of(p, self._stages.get(id(p))).parts for name, p in named}
        if any(part > 1 for part in parts.values()):
            watched.parts = parts
        self._watched[id(optimizer)] = watched
        return watched


def _owners(names: Mapping[int, str], modules: list[nn.Module]) -> dict[str, str]:
    """The class of the module that each named parameter belongs to."""
    found = {}
    for module in modules:
        for parameter in (module.__dict__.get("_parameters") or {}).values():
            name = names.get(id(parameter))
            if name is not None:
                found[name] = type(module).__name__
    return found
