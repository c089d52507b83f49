"""Which modules and optimizers there are, and what their parameters are called.

They are looked for once, among the objects that the garbage collector knows, when a training
begins (about 50 ms). Nothing is put on the user's modules: a hook there would be pickled with them,
and one in front of each forward call would be traced by torch.compile.
"""

from __future__ import annotations

import gc
import itertools
import numbers
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tocsin.emitter.model.environments import environment_classes
from tocsin.emitter.model.mesh_names import Cuts, place_of, stage_class

DEAR_S: Final = 0.3
MAX_S: Final = 3.0
SHARE: Final = 0.01
"""Going through the heap takes at most `MAX_S` seconds and that share of the process's CPU time,
where once takes more than `DEAR_S`."""

_MAX_VALUES: Final = 1000
_NOT_THE_PROGRAM: Final = ("tocsin.", "torch.", "_pytest", "importlib")

_AT_ONCE: Final = 50_000
"""Objects that are gone through before another thread gets its turn."""

MAX_GROUPS: Final = 64
"""Parameter groups whose learning rates are read."""

_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_MARKS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Found:
    """Live modules, optimizers, and stages of a pipeline.

    Attributes:
        environment: whether there is one for a model to act in.
    """

    modules: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    stages: tuple[object, ...]
    environment: bool = False


class _Walks:
    """What going through the heap has cost in this process, in CPU seconds of the thread."""

    def __init__(self) -> None:
        self.all_s = self.last_s = 0.0

    @property
    def too_dear(self) -> bool:
        """Whether there must be no more: each costs a lot, and so did those before."""
        most_s = MAX_S + SHARE * time.process_time()
        return self.last_s > DEAR_S and self.all_s + self.last_s > most_s

    def reset(self) -> None:
        """As in a new process."""
        self.all_s = self.last_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.all_s, self.last_s = self.all_s + seconds, seconds


walks: Final = _Walks()


def find() -> Found:
    """All modules and optimizers of this process that are alive, as far as the collector knows.

    Goes through the heap: some 50 ms, more where that is large. None where it is so large that
    looking has become too dear: see `in_sight`.
    """
    if walks.too_dear:
        return Found((), (), ())
    began = time.thread_time()
    stage_type = stage_class()
    optimizer_types = _with_subclasses(torch.optim.Optimizer)
    module_types = _with_subclasses(nn.Module)
    stage_types = {} if stage_type is None else _with_subclasses(stage_type)
    environment_types = {i for each in environment_classes() for i in _with_subclasses(each)}
    wanted = {*optimizer_types, *module_types, *stage_types, *environment_types}
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    stages: list[object] = []
    environment = False
    things = gc.get_objects()
    for start in range(0, len(things), _AT_ONCE):
        part = things[start : start + _AT_ONCE]
        # `type`, not `isinstance`: a lazy proxy would answer `__class__` with code of its own.
        kinds = map(id, map(type, part))
        for thing in itertools.compress(part, map(wanted.__contains__, kinds)):
            if id(type(thing)) in module_types:
                modules.append(thing)
            elif id(type(thing)) in optimizer_types:
                optimizers.append(thing)
            elif id(type(thing)) in environment_types:
                environment = True
            else:
                stages.append(thing)
    del things
    walks.add(time.thread_time() - began)
    return Found(tuple(modules), tuple(optimizers), tuple(stages), environment)


def may_be_hidden() -> bool:
    """Whether there may be modules that `find` has not found."""
    return gc.get_freeze_count() > 0 or walks.too_dear


def in_sight() -> list[nn.Module]:
    """Modules that are in global variables of the program, or in attributes of what is: also those
    that the collector does not list after `gc.freeze()`. What only a function's variables hold is
    not found.
    """
    found: dict[int, nn.Module] = {}
    spaces = {id(main.__dict__): main.__dict__} if (main := sys.modules.get("__main__")) else {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_NOT_THE_PROGRAM):
            spaces[id(frame.f_globals)] = frame.f_globals
        frame = frame.f_back
    for space in spaces.values():
        for value in list(space.values())[:_MAX_VALUES]:
            for held in (value, *_attributes(value)):
                if issubclass(type(held), nn.Module):
                    found.update((id(module), module) for module in held.modules())
    return list(found.values())


def _attributes(value: object) -> list[object]:
    if isinstance(value, type | ModuleType | FunctionType):
        return []
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return list(held.values())[:_MAX_VALUES] if type(held) is dict else []


def _with_subclasses(kind: type) -> dict[int, type]:
    """By their ids: a metaclass may compare its classes as it likes, and give them no hash."""
    found, waiting = {id(kind): kind}, [kind]
    while waiting:
        subclasses: list[type] = type.__subclasses__(waiting.pop())
        for each in subclasses:
            if id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return found


@dataclass(frozen=True, slots=True)
class Names:
    """`by_id[id(parameter)]` is its name, with its place in the mesh where this rank holds a part;
    `order` its place in forward order. `root` is the module that holds most of the parameters.
    """

    by_id: dict[int, str]
    order: dict[int, int]
    root: nn.Module | None


def name_parameters(
    parameters: Sequence[torch.Tensor],
    modules: Iterable[nn.Module],
    cuts: Cuts | None = None,
) -> Names:
    """Name these parameters, of any shape, after the module that holds most of them.

    A wrapper (DDP, torch.compile) adds nothing to the names. Those of a second model get the names
    of that one, with its class in front where both have the same.
    """
    wanted = {id(parameter) for parameter in parameters}
    by_id: dict[int, str] = {}
    order: dict[int, int] = {}
    taken: set[str] = set()
    cuts = cuts or {}
    first: nn.Module | None = None
    for root in _roots(wanted, modules):
        named = [(n, p) for n, p in root.named_parameters() if id(p) in wanted]
        new = [(clean(n, root), p) for n, p in named if id(p) not in by_id]
        if not new:
            continue
        first = root if first is None else first
        clash = any(name in taken for name, _ in new)
        for name, parameter in new:
            unique = f"{type(root).__name__}.{name}" if clash else name
            n = 2
            while unique in taken:
                unique = f"{type(root).__name__}#{n}.{name}"
                n += 1
            taken.add(unique)
            order[id(parameter)] = len(order)
            by_id[id(parameter)] = unique + place_of(parameter, cuts.get(id(parameter), ())).suffix
    return Names(by_id, order, first)


def _roots(wanted: set[int], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules that hold wanted parameters and are nobody's child, those with most of them first."""
    holders: list[tuple[int, nn.Module]] = []
    children: set[int] = set()
    for module in modules:
        own = module.__dict__.get("_modules")
        if own is None:  # its __init__ has not run
            continue
        children.update(id(child) for child in own.values() if child is not None)
        holders.append((0, module))
    found = []
    for _, module in holders:
        if id(module) in children:
            continue
        count = sum(id(parameter) in wanted for parameter in module.parameters())
        if count:
            found.append((count, module))
    # The same on each rank: by count and class, not by address.
    found.sort(key=lambda pair: (-pair[0], len(list(pair[1].modules())), type(pair[1]).__name__))
    return [module for _, module in found]


def unwrapped(root: nn.Module) -> list[nn.Module]:
    """What wrappers (DDP, torch.compile) hold inside, the innermost last; empty for none."""
    inner: list[nn.Module] = []
    module: nn.Module | None = root
    while module is not None:
        children = module.__dict__.get("_modules") or {}
        module = children.get("_orig_mod") or (
            children.get("module") if type(module).__name__ in _WRAPPERS else None
        )
        if module is not None:
            inner.append(module)
    return inner


def own_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """What a module holds under this name, of any shape; None where it has to be computed.

    A parametrized weight is a property: to read it would draw random numbers, or take one more
    step of the power iteration of a spectral norm.
    """
    own = module.__dict__
    found = (own.get("_parameters") or {}).get(name)
    found = own.get(name) if found is None else found
    return found if isinstance(found, torch.Tensor) else None


def clean(name: str, root: nn.Module) -> str:
    """A parameter's name without what wrappers put into it."""
    for mark in _MARKS:
        name = name.replace(mark, "")
    module: nn.Module = root
    for inner in (root, *unwrapped(root)):
        module = inner
        if type(module).__name__ in _WRAPPERS:
            name = name.removeprefix("module.")
    return name


def hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the global step hooks see this optimizer (not a wrapper that only looks like one)."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def size(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters it has, over all groups."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int, torch.Tensor]]:
    """(group, place in the group, parameter of any shape) of all that this optimizer may change."""
    return [
        (g, i, parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


def numel(parameter: torch.Tensor) -> int:
    """How many numbers a parameter of any shape has; a lazy one has none before its first call."""
    return 0 if is_lazy(parameter) else parameter.numel()


def found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler told this fused optimizer that its gradients are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found.item())


def rate(group: Mapping[str, object], name: str) -> float | None:
    """A learning rate of a parameter group as a number; None where there is none to read.

    One on a GPU (capturable optimizers) would have to be waited for; some optimizers have none.
    """
    value = group.get(name)
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, numbers.Real) else None
