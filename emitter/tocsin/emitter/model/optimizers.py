"""The optimizers of a training: which of them counts the steps, and what their parameters are
called.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.model.mesh_names import base_name, cuts_by_parameter, place_of
from tocsin.emitter.model.tensor_refs import TensorRef, ref_to
from tocsin.emitter.plan.collections import CollectionPlan

PRIMARY_PATIENCE: Final = 10
"""Steps that another optimizer makes while the primary makes none, before it takes its place; or
twice as many as it has ever made between two of the primary's, where that is more.
"""

ALONE_PATIENCE: Final = 3
"""The same, where the primary has made `ALONE` steps and no other optimizer one between them."""

ALONE: Final = 20
"""Steps, too, that a training must have made before another one can begin in its place."""

CHECK_EVERY: Final = 100
"""Steps of an optimizer between two looks at each of its parameters, whether it is another one."""

_MAX_KNOWN: Final = 1000
_MAX_GONE: Final = 16

_MAX_SEARCHES: Final = 20
"""How often a training's modules are looked for, which takes some 50 ms; parameters that come up
later are named after their optimizer.
"""


@dataclass(slots=True, eq=False)
class WatchedOptimizer:
    """One optimizer and the names of its parameters, in forward order.

    No parameter is held here: one that is replaced must be free to go. A name belongs to a place
    in the optimizer's groups, and the parameter is whatever is found there.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    names: tuple[str, ...]
    places: tuple[int, ...]
    """Of each name the place in the groups, one behind the other."""

    size: int
    """How many places there are, with those of parameters of which nothing is on this rank."""

    ends: tuple[tuple[int, int, int], ...]
    own: dict[int, TensorRef]
    """The parameters, of any shape, by their ids; of an optimizer that is gone, too."""

    steps: int = 0
    alone: int = 0
    """Steps since the primary's last one, in that `turn`."""
    turn: int = 0
    stale: bool = False
    """Whether it is known to have other parameters than these."""
    chosen: dict[str, frozenset[str]] = field(default_factory=dict)
    parts: dict[str, int] | None = None
    """In how many parts over the ranks each parameter is cut; None where all are whole here."""

    @property
    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters, of any shape; none where the optimizer is gone, or has fewer than
        it had.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return []
        flat = [p for group in optimizer.param_groups for p in group["params"]]
        if len(flat) < self.size:
            return []
        return list(zip(self.names, map(flat.__getitem__, self.places), strict=True))

    @property
    def has_gradients(self) -> bool:
        """Whether one of its parameters has a gradient; asked at each step, so no list is made."""
        optimizer = self.optimizer()
        groups = () if optimizer is None else optimizer.param_groups
        return any(p.grad is not None for group in groups for p in group["params"])

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether that tensor, of any shape, is one of the optimizer's parameters, and not another
        one with the id that one has had.
        """
        own = self.own.get(id(parameter))
        return own is not None and own.get() is parameter

    def shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether that one has a parameter of these."""
        return any(self.holds(p) for *_, p in discovery.parameters_of(optimizer))


class Optimizers:
    """The optimizers of one training.

    `preferred` is the one that the user has named the main one, and `model` the model; `used` are
    those of trainings before, which have no part in this one unless they step.
    """

    def __init__(
        self,
        first: torch.optim.Optimizer,
        preferred: torch.optim.Optimizer | None = None,
        used: Collection[torch.optim.Optimizer] = (),
        model: nn.Module | None = None,
    ) -> None:
        self._searches = 0
        self._model = None if model is None else weakref.ref(model)
        self.homeless = False
        """Whether there are parameters of modules of which no module was found."""
        self._dead: list[tuple[int, WatchedOptimizer]] = []
        self._used = used
        self._turn = self._alone = self._most_alone = 0
        self.steps = 0
        """All that were made, by whichever."""
        self._gone: deque[WatchedOptimizer] = deque(maxlen=_MAX_GONE)
        self.is_one_of_ranks = False
        """Whether other ranks must come to the same end of a training, at the same step."""
        self.settled = False
        """Whether an optimizer has come back that seemed to be done: nothing is over any more."""
        found = self._discover()
        self.environment = found.environment
        """Whether there was one for the model to act in when the training began."""
        self._root: weakref.ref[nn.Module] | None = None
        self._names: dict[int, str] = {}
        self._types: dict[str, str] = {}
        alive = [o for o in found.optimizers if discovery.hooked(o) and o not in used]
        if not any(o is first for o in alive):
            alive.append(first)
        own = {id(p) for *_, p in discovery.parameters_of(first)}
        primary = max(
            # One over the same parameters waits for its turn: they do not both make the steps.
            (o for o in alive if o is first or own.isdisjoint(_ids(o))),
            key=lambda o: (
                o is preferred,
                sum(discovery.numel(p) for *_, p in discovery.parameters_of(o)),
                o is first,
            ),
        )
        self._watched: dict[int, WatchedOptimizer] = {}
        # Not by its id: the next optimizer may have that as soon as this one is gone.
        self._primary = self._watch(primary)
        for optimizer in alive:
            if optimizer is not primary:
                self._watch(optimizer)

    @property
    def count(self) -> int:
        """How many are alive."""
        return len(self._watched) - len(self._dead)

    @property
    def primary(self) -> WatchedOptimizer:
        """The one whose steps count."""
        return self._primary

    def modules(self) -> list[nn.Module]:
        """The root modules that still exist, as they were found when an optimizer was last new."""
        return [m for m in (ref() for ref in self._modules) if m is not None]

    def use_model(self, model: nn.Module) -> None:
        """The user names the model: it is the one, and names are found anew."""
        self._model, self._root = weakref.ref(model), None
        self._names.clear()
        self._types.clear()
        self._remember((*self.modules(), *model.modules()))
        for before in list(self._watched.values()):
            optimizer = before.optimizer()
            if optimizer is not None:
                self._watch_again(optimizer, before)

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
        return self._primary.optimizer() is optimizer

    def alive(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        found = (watched.optimizer() for watched in self._watched.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of all optimizers, of any shape, each once."""
        found = {id(p): p for w in self._watched.values() for _, p in w.parameters}
        return list(found.values())

    def each_parameter(self) -> Iterator[torch.Tensor]:
        """The parameters, of any shape, of one optimizer after the other, the primary's first; some
        come twice.
        """
        yield from (p for _, p in self.primary.parameters)
        for watched in list(self._watched.values()):
            yield from (p for _, p in watched.parameters)

    def state_of(self, parameter: torch.Tensor) -> list[object]:
        """What optimizers keep of this parameter, of any shape: averages of gradients, counts."""
        states = (
            optimizer.state.get(parameter)
            for watched in list(self._watched.values())
            if watched.holds(parameter) and (optimizer := watched.optimizer()) is not None
        )
        return [value for held in states if isinstance(held, Mapping) for value in held.values()]

    def watched(self, optimizer: torch.optim.Optimizer, *, check: bool = True) -> WatchedOptimizer:
        """What is known of it; read anew where it is new or has other parameters. `check`: whether
        it is asked how many it has.
        """
        if self._dead:
            self._bury()
        watched = self._watched.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            if watched is None and len(self._watched) > _MAX_KNOWN:
                main = self._primary.optimizer()
                self._watched = {} if main is None else {id(main): self._primary}
            return self._watch(optimizer, search=True)
        if watched.stale or (check and watched.size != discovery.size(optimizer)):
            watched = self._watch_again(optimizer, watched)
        return watched

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it was there before."""
        watched = self._watched.get(id(optimizer))
        return watched is not None and watched.optimizer() is optimizer

    def steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How many it has made in this training."""
        watched = self._watched.get(id(optimizer))
        return 0 if watched is None or watched.optimizer() is not optimizer else watched.steps

    def counts(
        self, optimizer: torch.optim.Optimizer, watched: WatchedOptimizer, *, check: bool = True
    ) -> bool:
        """This optimizer has made a step: whether that is a step of the training. `check`: whether
        it is asked if its parameters are the same; each `CHECK_EVERY` steps it is in any case.

        Where the primary makes none any more, the one that does takes its place.
        """
        watched.steps += 1
        self.steps += 1
        whole = watched.steps % CHECK_EVERY == 0
        replaced = check and watched.ends != _ends(optimizer)
        if replaced or (whole and not _same(watched, optimizer)):
            watched.stale = True
        if watched is self._primary:
            self._turn += 1
            self._alone, self._most_alone = 0, max(self._alone, self._most_alone)
            return True
        alone = watched.alone + 1 if watched.turn == self._turn else 1
        watched.turn, watched.alone = self._turn, alone
        self._alone = max(self._alone, alone)
        if optimizer in self._used:
            self.settled = True
        primary = self.primary
        # In the place of one that is gone: a new one, or one over the same parameters.
        follows = self._is_gone(primary) and (watched.steps == 1 or primary.shares(optimizer))
        if not follows and alone <= self._patience:
            return False
        if primary.steps:
            self._most_alone = max(self._alone, self._most_alone)
        self._primary = watched
        self._turn += 1
        self._alone = 0
        return True

    def counts_primary(self, optimizer: torch.optim.Optimizer, *, check: bool) -> WatchedOptimizer:
        """Whether the primary optimizer's step counts as a step of the training."""
        watched = self._primary
        if check or (watched.steps + 1) % CHECK_EVERY == 0:
            self.counts(optimizer, watched, check=check)
            return watched
        watched.steps += 1
        self.steps += 1
        self._turn += 1
        if self._alone:
            self._alone, self._most_alone = 0, max(self._alone, self._most_alone)
        return watched

    def counts_other(self, optimizer: torch.optim.Optimizer) -> bool:
        """A known optimizer that is not the primary has made a step: whether that is counted here,
        where no more is to be asked. Else, as at its first step, `counts` is to be called.
        """
        watched = self._watched[id(optimizer)]
        alone = watched.alone + 1 if watched.turn == self._turn else 1
        if alone > 1 or watched.steps == 0 or (watched.steps + 1) % CHECK_EVERY == 0:
            return False
        watched.steps += 1
        self.steps += 1
        watched.turn, watched.alone = self._turn, alone
        self._alone = max(self._alone, alone)
        return True

    def passed(self, steps: int) -> None:
        """The primary has made so many, and nobody has looked."""
        watched = self._primary
        optimizer, before = watched.optimizer(), watched.steps
        watched.steps += steps
        self.steps += steps
        self._turn += steps
        if (
            optimizer is not None
            and before // CHECK_EVERY != watched.steps // CHECK_EVERY
            and not _same(watched, optimizer)
        ):
            watched.stale = True

    def is_of_training(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has a parameter of one that has made steps in this training."""
        return any(
            other.steps and other.optimizer() is not optimizer and other.shares(optimizer)
            for other in (*self._watched.values(), *self._gone, self._primary)
        )

    def is_over(self, optimizer: torch.optim.Optimizer, *, left: bool) -> bool:
        """This optimizer is about to make a step: whether it is the first of another training.

        It is, where the primary is gone or rests, and this one has no parameter of this training.
        Of a training whose loop was `left` for a stop the primary rests.
        """
        primary = self.primary
        if primary.optimizer() is optimizer or self.settled:
            return False
        if primary.steps < ALONE and not left:
            return False
        watched = self._watched.get(id(optimizer))
        if watched is not None and watched.optimizer() is not optimizer:
            watched = None
        if left and (watched is None or watched.steps == 0):
            others = list(self._watched.values())
        elif watched is not None and watched.turn == self._turn and watched.alone >= self._patience:
            others = [w for w in self._watched.values() if w is not watched]
        else:
            fresh = watched is None or watched.steps == 0
            if not fresh or not self._is_gone(primary):
                return False
            others = list(self._watched.values())
        return optimizer not in self._used and not any(
            other.steps and other.shares(optimizer) for other in (*others, *self._gone, primary)
        )

    def _is_gone(self, primary: WatchedOptimizer) -> bool:
        """Whether nothing more can come of it, as far as all ranks see that at the same step.

        The garbage collector runs on each of them when it likes: with several it is not asked, and
        a primary that is gone rests.
        """
        return not self.is_one_of_ranks and primary.optimizer() is None

    @property
    def _patience(self) -> int:
        if self._most_alone == 0 and self.primary.steps >= ALONE:
            return ALONE_PATIENCE
        return max(PRIMARY_PATIENCE, 2 * self._most_alone)

    def chosen(self, watched: WatchedOptimizer, plan: CollectionPlan) -> frozenset[str] | None:
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
        for key, watched in dead:
            if self._watched.get(key) is watched:
                del self._watched[key]
            if watched.steps:
                self._gone.append(watched)
            self._drop_names(watched, but={})

    def _drop_names(self, gone: WatchedOptimizer, *, but: Collection[int]) -> None:
        """Of parameters that no other optimizer has: another tensor may have that id by now."""
        others = [w.own for w in self._watched.values() if w is not gone]
        for parameter in gone.own:
            held = any(own[parameter].get() is not None for own in others if parameter in own)
            if parameter not in but and not held:
                self._names.pop(parameter, None)

    def _watch_again(
        self, optimizer: torch.optim.Optimizer, before: WatchedOptimizer
    ) -> WatchedOptimizer:
        """It has other parameters than before; those that stay keep their names."""
        stay = {id(p) for *_, p in discovery.parameters_of(optimizer) if before.holds(p)}
        self._drop_names(before, but=stay)
        watched = self._watch(optimizer, search=True)
        watched.steps, watched.alone, watched.turn = before.steps, before.alone, before.turn
        if before is self._primary:
            self._primary = watched
        return watched

    def _discover(self) -> discovery.Found:
        self._searches += 1
        found = discovery.find()
        model = None if self._model is None else self._model()
        named = () if model is None else tuple(model.modules())
        self._remember((*found.modules, *named))
        self._cuts = cuts_by_parameter(self.modules(), found.stages)
        return found

    def _remember(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in {id(m): m for m in modules}.values()]

    def _root_of(
        self, names: discovery.Names, parameters: Iterable[torch.Tensor]
    ) -> nn.Module | None:
        """The model that the user has named, if it has some of these; else what holds most."""
        model = None if self._model is None else self._model()
        own = set() if model is None else {id(p) for p in model.parameters()}
        return model if any(id(p) in own for p in parameters) else names.root

    def _watch(self, optimizer: torch.optim.Optimizer, *, search: bool = False) -> WatchedOptimizer:
        entries = discovery.parameters_of(optimizer)
        parameters = [p for *_, p in entries]
        unknown = [p for p in parameters if id(p) not in self._names]
        live = self.modules()
        names = discovery.name_parameters(parameters, live, self._cuts)
        if unknown:
            if search and self._searches < _MAX_SEARCHES and len(names.by_id) < len(parameters):
                self._discover()
                live = self.modules()
                names = discovery.name_parameters(parameters, live, self._cuts)
            if len(names.by_id) < len(parameters):
                hidden = discovery.in_sight()
                self._remember((*live, *hidden))
                self._cuts = {**cuts_by_parameter(hidden, ()), **self._cuts}
                live = self.modules()
                names = discovery.name_parameters(parameters, live, self._cuts)
            self.homeless |= discovery.may_be_hidden() and any(
                isinstance(p, nn.Parameter) and id(p) not in names.by_id for p in unknown
            )
            if self.root is None and (root := self._root_of(names, parameters)) is not None:
                self._root = weakref.ref(root)
            taken = set(self._names.values())
            for group, place, parameter in entries:
                if id(parameter) in self._names:
                    continue
                name = names.by_id.get(id(parameter), f"group{group}.{place}")
                if name in taken:
                    numbered = (f"optimizer{n}.{name}" for n in itertools.count(len(self._watched)))
                    name = next(each for each in numbered if each not in taken)
                taken.add(name)
                self._names[id(parameter)] = name
            self._types.update(_owners(self._names, live))
        order, last = names.order, len(names.order)
        cut = [place_of(p, self._cuts.get(id(p), ())) for p in parameters]
        places = sorted(
            (i for i, place in enumerate(cut) if not place.empty),
            key=lambda i: order.get(id(parameters[i]), last),
        )
        key = id(optimizer)

        def gone(_: weakref.ref[torch.optim.Optimizer]) -> None:
            self._dead.append((key, watched))

        watched = WatchedOptimizer(
            weakref.ref(optimizer, gone),
            tuple(self._names[id(parameters[i])] for i in places),
            tuple(places),
            len(parameters),
            _ends(optimizer),
            {id(p): ref_to(p) for p in parameters},
        )
        parts = {self._names[id(p)]: c.parts for p, c in zip(parameters, cut, strict=True)}
        if any(part > 1 for part in parts.values()):
            watched.parts = parts
        self._watched[id(optimizer)] = watched
        return watched


def _ids(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    return (id(p) for *_, p in discovery.parameters_of(optimizer))


def _ends(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, int, int], ...]:
    """What is another one, for a little time, where parameters have been replaced."""
    return tuple(
        (len(own), id(own[0]) if own else 0, id(own[-1]) if own else 0)
        for own in (group["params"] for group in optimizer.param_groups)
    )


def _same(watched: WatchedOptimizer, optimizer: torch.optim.Optimizer) -> bool:
    """Whether each parameter is the one that was there."""
    return all(watched.holds(p) for *_, p in discovery.parameters_of(optimizer))


def _owners(names: Mapping[int, str], modules: list[nn.Module]) -> dict[str, str]:
    """The class of the module that each named parameter belongs to."""
    found = {}
    for module in modules:
        for parameter in (module.__dict__.get("_parameters") or {}).values():
            name = names.get(id(parameter))
            if name is not None:
                found[name] = type(module).__name__
    return found
