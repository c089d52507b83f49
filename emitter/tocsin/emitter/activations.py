"""Activations of ReLU-like modules, by type of the module: which share of their units is dead.

What sits in torch is `__call__` of the classes ReLU and ReLU6, not a hook of the user's modules: a
hook would be pickled and copied with them. A compiled model has no such calls; nothing of ours is
in its graph, and one line says that its activations cannot be seen.

At a step that is to be summarised, and in a module that trains, a sample of the output is looked
at: as many values of each unit as make 16,384 in all, at least 128, evenly spread over the batch.
Only the first forward call before a backward counts.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import nn

from tocsin.emitter import models
from tocsin.emitter.host_copy import HostCopy, is_recording
from tocsin.emitter.wall import Wall
from tocsin.schemas.telemetry import Counts, Floats

LOOKS: Final = 16_384
LEAST_LOOKS: Final = 128
"""Of each unit, so that 1 % is one of them at least; a smaller batch is read whole."""

FEWEST: Final = 32
"""Below so many looks at a unit nothing is said of it."""

INACTIVE: Final = 0.01
"""A unit is dead that is active in a smaller share of the looks."""

MAX_MODULES: Final = 1000
PATIENCE: Final = 3

_CHANNELS_FIRST: Final = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)


@dataclass(slots=True, eq=False)
class Seen:
    """What one step's ReLUs said: in forward order, `dead` shares on the host or on their way."""

    names: list[str] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    dead: list[torch.Tensor] = field(default_factory=list)
    copy: HostCopy | None = None

    def send_off(self) -> Seen:
        """Start the copy from a GPU."""
        if self.dead and self.dead[0].device.type != "cpu":
            home = self.dead[0].device
            self.copy = HostCopy(torch.stack([share.to(home) for share in self.dead]))
        return self

    def rows(self) -> tuple[tuple[str, ...], Floats, Counts]:
        """Names, `dead` from 0 to 1, and how many values were looked at, of finite outputs."""
        found = self.dead if self.copy is None else self.copy.values()
        shares = np.asarray([float(share) for share in found], np.float32)
        finite = np.flatnonzero(np.isfinite(shares))
        looks = np.asarray(self.looks, np.uint64)[finite]
        names = tuple(self.names[i] for i in finite)
        return names, shares[finite].reshape(-1, 1), looks.reshape(-1, 1)


class Activations:
    """Which ReLUs there are, and whether this step's are looked at."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another training begins."""
        self.due = False
        self.blind = False
        """Whether there are ReLUs that cannot be seen; nothing is looked at any more."""
        self._known: dict[int, tuple[weakref.ref[nn.Module], str, bool]] | None = None
        self._compiled = self._armed = False
        self._calls: dict[int, int] = {}
        self._seen = Seen()
        self._vain = 0

    def arm(self, root: nn.Module | None) -> None:
        """Look at the next step."""
        if root is None or self._vain >= PATIENCE or self.blind:
            return
        if self._known is None:
            self._known = _relus(root)
            self._compiled = _is_compiled(root)
        self._calls, self._seen = {}, Seen()
        self.due = self._armed = bool(self._known)

    def see(self, module: nn.Module, output: object) -> None:
        """A ReLU was called."""
        known = None if self._known is None else self._known.get(id(module))
        if known is None or not isinstance(output, torch.Tensor):
            return
        same = known[0]() is module
        if (
            not same
            or not module.training
            or not torch.is_grad_enabled()
            or is_recording()
            or len(self._seen.names) >= MAX_MODULES
        ):
            return
        _, name, channels_first = known
        calls = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        sample = _looked_at(output.detach(), channels_first=channels_first)
        if sample is None:
            return
        with torch.no_grad():
            active = (sample > 0).mean(dim=1, dtype=torch.float32)
            # NaN is not greater than 0, and dead is not what it is: it makes the share NaN.
            poison = 0.0 * sample.sum(dtype=torch.float32)
            dead = (active < INACTIVE).mean(dtype=torch.float32) + poison
        self._seen.names.append(name if calls == 1 else f"{name}#{calls}")
        self._seen.looks.append(sample.numel())
        self._seen.dead.append(dead)

    def take(self) -> Seen | None:
        """What was seen since `arm`; None: nothing, or nothing was due."""
        armed, self._armed, self.due = self._armed, False, False
        seen, self._seen = self._seen, Seen()
        if seen.names:
            self._vain = 0
            return seen.send_off()
        if armed:
            self._vain += 1
            self.blind = self._compiled
        return None


activations: Final = Activations()
"""Those of this process."""


def install(wall: Wall) -> None:
    """Put the hook into torch."""
    for kind in (nn.ReLU, nn.ReLU6):
        _wrap(kind, wall)


def _wrap(kind: type[nn.Module], wall: Wall) -> None:
    @functools.wraps(nn.Module.__call__)
    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        # Looked up at each call: tracers put their own in its place.
        result = nn.Module.__call__(self, *args, **kwargs)
        # First of all, so that a compiler sees a constant and nothing that changes.
        if torch.compiler.is_compiling():
            return result
        if activations.due:
            wall.call("activations", activations.see, self, result)
        return result

    kind.__call__ = call


def _relus(root: nn.Module) -> dict[int, tuple[weakref.ref[nn.Module], str, bool]]:
    """The ReLUs of a model by id: name, and whether channels stand in dimension 1 there."""
    found: dict[int, tuple[weakref.ref[nn.Module], str, bool]] = {}
    channels_first = False
    for name, module in root.named_modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            if len(found) < MAX_MODULES:
                clean = models.clean(name, root) or type(module).__name__
                found[id(module)] = (weakref.ref(module), clean, channels_first)
        elif module.__dict__.get("_parameters"):
            channels_first = isinstance(module, _CHANNELS_FIRST)
    return found


def _is_compiled(root: nn.Module) -> bool:
    modules = list(root.modules())
    return any(
        "_orig_mod" in module.__dict__.get("_modules", {})
        or module.__dict__.get("_compiled_call_impl") is not None
        for module in modules
    )


def _looked_at(output: torch.Tensor, *, channels_first: bool) -> torch.Tensor | None:
    """A part of the output as [units, looks]; None: too little to say something."""
    if output.dim() < 2 or not output.is_floating_point() or hasattr(output, "to_local"):
        return None
    if channels_first and output.dim() > 2:
        units, width = output.shape[1], output.shape[-1]
        values = output.flatten(2)
        looks = max(LEAST_LOOKS, LOOKS // max(1, units))
        values = values[:: max(1, values.shape[0] // looks)]
        apart = max(1, values.shape[0] * values.shape[2] // looks)
        if apart > 1 and apart % width == 0:
            apart += 1  # not the same column of the image each time
        sample = values[:, :, ::apart].movedim(1, 0).reshape(units, -1)
    else:
        units = output.shape[-1]
        values = output.reshape(-1, units)
        looks = max(LEAST_LOOKS, LOOKS // max(1, units))
        sample = values[:: max(1, values.shape[0] // looks)].t()
    return sample if units and sample.shape[1] >= FEWEST else None
