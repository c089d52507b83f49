"""Frozen weights that still have the values of their initialisation, below layers that train.

Most often those of a backbone whose pretrained weights were never loaded. The forward pass of one
of the steps 2 to 6 shows which modules are called in front of the first that trains. Samples of
their weights are compared with the distributions that torch and its libraries initialise with:

- uniform: nothing lies beyond a bound that follows from the shape, and the largest value lies
  right below it. A few steps of training move some values out of it.
- normal: mean and fourth moment fit. Trained weights may look like that, too, so the vectors of the
  same modules must all be untouched: zeros, ones, or uniform within their bound.

Three steps later the weights must be frozen still, and nobody may have written to them: a momentum
encoder is written to. Weights of an optimizer that has nothing but frozen ones wait for their turn,
as a generator's. A first layer that is like the first one that trains belongs to a copy beside the
model, as a target network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.model.mesh_names import is_distributed
from tocsin.emitter.model.tensor_refs import TensorRef, ref_to
from tocsin.emitter.statistics.async_copy import HostCopy, by_device
from tocsin.emitter.statistics.readable import is_readable
from tocsin.emitter.statistics.tables import Table

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.probes.program_checks.module_calls import Calls

PROBE: Final = "frozen weights"
UNTRAINED: Final = "untrained"

FIRST: Final = 2
"""The step from which on the weights are looked at, once."""

APART: Final = 3
"""Steps until they are asked whether they have changed."""

MIN_FROZEN: Final = 3
"""Frozen weights in front; with fewer, it is a fixed embedding or a layer of random features."""

MAX_TENSORS: Final = 64
MAX_VALUES: Final = 32_768
_FEWEST: Final = 64
"""Values below which a weight is no evidence."""

COLUMNS: Final = ("std", "absmax", "kurtosis", "bound")
COUNT_COLUMNS: Final = ("numel", "normal", "matrices", "frozen")


@dataclass(slots=True, eq=False)
class _Weight:
    """A parameter in front: a weight, or a vector of the same module."""

    name: str
    parameter: TensorRef
    version: int
    bounds: tuple[float, ...]
    matrix: bool
    numel: int
    tolerance: float


@dataclass(slots=True)
class _Found:
    step: int
    matrices: int
    frozen: int
    weights: list[_Weight]
    copies: list[tuple[list[int], HostCopy | torch.Tensor]]


class FrozenWeights:
    """The frozen weights of one training."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.over = False
        self._found: _Found | None = None

    def inspect(self, optimizers: Optimizers, calls: Calls | None, step: int) -> Table | None:
        """To be called behind each step until it is `over`; a table of those that are untrained,
        once that is known.
        """
        if self._found is None:
            if calls is not None and calls.by_module and step >= FIRST:
                self._found = _inspect(optimizers, calls, step)
                self.over = self._found is None
            return None
        if step < self._found.step + APART:
            return None
        if not all(c.ready() for _, c in self._found.copies if isinstance(c, HostCopy)):
            return None
        found, self._found, self.over = self._found, None, True
        return _table(found)


def _inspect(optimizers: Optimizers, calls: Calls, step: int) -> _Found | None:
    root = optimizers.root
    if root is None:
        return None
    named = {id(module): (name, module) for name, module in root.named_modules()}
    waiting = _waiting(optimizers)
    front: list[tuple[str, nn.Module, torch.Tensor, str]] = []
    matrices = frozen = 0
    first: tuple[object, ...] | None = None
    trains: tuple[object, ...] | None = None
    for key, seen in calls.by_module.items():
        name, module = named.get(key, ("", None))
        own = {} if module is None else module.__dict__.get("_parameters") or {}
        held = [(n, p) for n, p in own.items() if p is not None]
        if module is None or not held:
            continue
        if any(is_distributed(p) or id(p) in waiting for _, p in held):
            return None  # a part of a weight, or of a model that takes turns
        matrices += sum(p.dim() > 1 for _, p in held)
        shape = next((tuple(p.shape) for _, p in held if p.dim() > 1), ())
        if trains is None and any(p.requires_grad for _, p in held):
            if first is None or first[0] == seen.given or first[1:] == (type(module), shape):
                return None
            trains = (seen.given, type(module), shape)
        if trains is None:
            first = first or (seen.given, type(module), shape)
            frozen += sum(p.dim() > 1 for _, p in held)
            front += [(f"{name}.{n}" if name else n, module, p, n) for n, p in held]
    if trains is None or frozen < MIN_FROZEN:
        return None
    return _sampled(front, root, step, matrices, frozen)


def _waiting(optimizers: Optimizers) -> set[int]:
    """The parameters of optimizers that have nothing to train now."""
    waiting: set[int] = set()
    for optimizer in optimizers.alive():
        own = [p for *_, p in discovery.parameters_of(optimizer)]
        if not any(p.requires_grad for p in own):
            waiting.update(map(id, own))
    return waiting


def _sampled(
    front: Sequence[tuple[str, nn.Module, torch.Tensor, str]],
    root: nn.Module,
    step: int,
    matrices: int,
    frozen: int,
) -> _Found:
    apart = -(-len(front) // MAX_TENSORS)
    weights: list[_Weight] = []
    values: list[torch.Tensor] = []
    for name, module, parameter, own in front[:: apart if apart % 2 else apart + 1]:
        matrix = parameter.dim() > 1
        if not is_readable(parameter) or not parameter.numel():
            continue
        if matrix and parameter.numel() < _FEWEST:
            continue
        weights.append(
            _Weight(
                discovery.clean(name, root),
                ref_to(parameter),
                parameter._version,
                _bounds(module, parameter, own),
                matrix,
                parameter.numel(),
                2 * torch.finfo(parameter.dtype).eps,
            )
        )
        flat = parameter.detach().reshape(-1)
        values.append(flat[:: -(-flat.numel() // MAX_VALUES)])
    copies: list[tuple[list[int], HostCopy | torch.Tensor]] = []
    for device, places in by_device(values).items():
        packed = torch.stack([_moments(values[i]) for i in places])
        copies.append((places, packed if device.type == "cpu" else HostCopy(packed)))
    return _Found(step, matrices, frozen, weights, copies)


def _moments(values: torch.Tensor) -> torch.Tensor:
    """Number, smallest, largest, mean, standard deviation, fourth moment in units of that."""
    values = values.to(torch.float32)
    mean = values.mean()
    apart = values - mean
    variance = apart.square().mean()
    fourth = apart.square().square().mean() / variance.square()
    count = torch.full_like(mean, values.numel())
    return torch.stack((count, values.min(), values.max(), mean, variance.sqrt(), fourth))


def _bounds(module: nn.Module, parameter: torch.Tensor, name: str) -> tuple[float, ...]:
    """Those that a parameter of that module may have been drawn within, uniformly."""
    hidden = getattr(module, "hidden_size", None)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and isinstance(hidden, int) and hidden:
        return (1 / math.sqrt(hidden),)
    weight = parameter
    if parameter.dim() < 2:
        held = discovery.own_tensor(module, "weight")
        if name != "bias" or held is None or held.dim() < 2:
            return ()
        weight = held
    rest = math.prod(weight.shape[2:])
    into, out = weight.shape[1] * rest, weight.shape[0] * rest
    if not into or not out:
        return ()
    return tuple(
        math.sqrt(share)
        for share in (1 / into, 6 / into, 3 / into, 6 / out, 6 / (into + out))
        if parameter.dim() > 1 or share == 1 / into
    )


def _table(found: _Found) -> Table | None:
    weights = found.weights
    moments = np.zeros((len(weights), 6))
    for places, copy in found.copies:
        moments[places] = copy.values() if isinstance(copy, HostCopy) else copy.double().numpy()
    for weight in weights:
        parameter = weight.parameter.get()
        if parameter is None or parameter.requires_grad or parameter._version != weight.version:
            return None
    bounds = [_uniform(w, m) for w, m in zip(weights, moments, strict=True)]
    vectors = [i for i, w in enumerate(weights) if not w.matrix]
    untouched = _untouched((weights[i], moments[i], bounds[i]) for i in vectors)
    chosen = [
        i
        for i, w in enumerate(weights)
        if w.matrix and (bounds[i] or (untouched and _normal(moments[i])))
    ]
    of = sum(w.matrix for w in weights)
    if len(chosen) < MIN_FROZEN or len(chosen) < 0.9 * of:
        return None
    absmax = np.abs(moments[:, 1:3]).max(axis=1)
    rows = [(moments[i, 4], absmax[i], moments[i, 5], bounds[i]) for i in chosen]
    counts = [(weights[i].numel, not bounds[i], found.matrices, found.frozen) for i in chosen]
    return Table(
        UNTRAINED,
        tuple(weights[i].name for i in chosen),
        np.array(rows, np.float32),
        np.array(counts, np.uint64),
        COLUMNS,
        COUNT_COLUMNS,
    )


def _uniform(weight: _Weight, moments: npt.NDArray[np.float64]) -> float:
    """The bound that it was drawn within; 0: none that is known."""
    count, low, high, mean, std, fourth = map(float, moments)
    largest = max(-low, high)
    for bound in weight.bounds:
        # Of n values drawn the largest lies some bound / n below; 20 of that is chance no more.
        beyond = largest > bound * (1 + weight.tolerance)
        if beyond or largest < bound * (1 - weight.tolerance - 20 / count):
            continue
        if not weight.matrix and count >= _FEWEST / 2:
            return bound
        spread = std * math.sqrt(3) / bound - 1
        error = 5 / math.sqrt(count)
        if weight.matrix and abs(spread) < error and abs(mean) < error * bound:
            return bound if abs(fourth - 1.8) < 2 * error else 0.0
    return 0.0


def _normal(moments: npt.NDArray[np.float64]) -> bool:
    """Whether mean and fourth moment are those of a normal distribution around zero."""
    count, _, _, mean, std, fourth = map(float, moments)
    error = 4 / math.sqrt(count)
    return std > 0 and abs(mean) < error * std and abs(fourth - 3) < error * math.sqrt(24)


def _untouched(
    vectors: Iterable[tuple[_Weight, npt.NDArray[np.float64], float]],
) -> bool:
    """Whether all vectors are as they were initialised, and enough of them show it."""
    signs = 0
    for weight, moments, bound in vectors:
        low, high = float(moments[1]), float(moments[2])
        if bound or (low == high and low in (0.0, 1.0)):
            signs += 1
        elif not weight.bounds or max(-low, high) > weight.bounds[0] * (1 + weight.tolerance):
            return False
    return signs >= MIN_FROZEN
