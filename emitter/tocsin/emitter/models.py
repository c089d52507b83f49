"""Which modules and optimizers there are, and what their parameters are called.

They are looked for once, among the objects that the garbage collector knows, when a training
begins (about 50 ms). Nothing is put on the user's modules: a hook there would be pickled with them,
and one in front of each forward call would be traced by torch.compile.
"""

from __future__ import annotations

import gc
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from tocsin.emitter.shards import Stage, place_of, stage_class, stages_by_parameter

_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_MARKS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Found:
    """Live modules and optimizers; the stages of a pipeline by the ids of their parameters."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    stages: Mapping[int, Stage] = field(default_factory=dict)


def find() -> Found:
    """All modules and optimizers of this process that are alive."""
    module_types: dict[type, int] = {}
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    stages: list[object] = []
    stage_type = stage_class()
    for thing in gc.get_objects():
        # `type`, not `isinstance`: a lazy proxy would answer `__class__` with code of its own.
        kind = type(thing)
        which = module_types.get(kind)
        if which is None:
            which = _kind(kind, stage_type)
            module_types[kind] = which
        if which == 1:
            modules.append(thing)
        elif which == 2:
            optimizers.append(thing)
        elif which == 3:
            stages.append(thing)
    return Found(tuple(modules), tuple(optimizers), stages_by_parameter(stages))


def _kind(kind: type, stage_type: type | None) -> int:
    mro = type.__dict__["__mro__"].__get__(kind)
    if nn.Module in mro:
        return 1
    if torch.optim.Optimizer in mro:
        return 2
    return 3 if stage_type is not None and stage_type in mro else 0


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
    stages: Mapping[int, Stage] | None = None,
) -> Names:
    """Name these parameters after the module that holds most of them.

    A wrapper (DDP, torch.compile) adds nothing to the names. Those of a second model get the names
    of that one, with its class in front where both have the same.
    """
    wanted = {id(parameter) for parameter in parameters}
    by_id: dict[int, str] = {}
    order: dict[int, int] = {}
    taken: set[str] = set()
    stages = stages or {}
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
            by_id[id(parameter)] = unique + place_of(parameter, stages.get(id(parameter))).suffix
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
    """(group, place in the group, parameter) of all that this optimizer may change."""
    return [
        (g, i, parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


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
