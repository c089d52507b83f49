"""The series of the optimizers that do not count the steps: a GAN's discriminator, say.

The losses of the backward calls since any optimizer's last step belong to the one that steps next;
one that steps right after another, with nothing computed between, shares its loss and sends none.
Its values are in the row of the primary's step that follows: `loss.NAME`, `lr.NAME`,
`gradient_norm.NAME`. It may have made several steps by then: the loss and the norm are their means,
the rate is the last.

NAME is the class of the module that holds most of its parameters, in lower case (`discriminator`);
where that is no name of its own, `optimizer1` and so on, in order of appearance.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.model.mesh_names import is_distributed
from tocsin.emitter.probes.losses import Loss
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording, on_device
from tocsin.emitter.statistics.reductions import dense, norms

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

MAX_OTHERS: Final = 16
MAX_STEPS: Final = 1000
"""Steps of one of them between two of the primary that are kept."""

_PLAIN: Final = frozenset(
    ("sequential", "modulelist", "moduledict", "module", "linear", "conv2d", "parameterlist")
)


@dataclass(slots=True, eq=False)
class _SecondaryOptimizer:
    optimizer: weakref.ref[torch.optim.Optimizer]
    name: str
    rate: float | None = None
    losses: list[Loss] = field(default_factory=list)
    """One of each step: the sum over its micro-batches."""
    norms: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SecondarySteps:
    """Their values since the primary's last step, on the host or on their way."""

    step: int
    columns: list[str]
    counts: list[int]
    """How many numbers each column is the mean of."""
    found: list[float] | HostCopy

    @property
    def ready(self) -> bool:
        """Whether the numbers are here; never waits."""
        return not isinstance(self.found, HostCopy) or self.found.ready()

    def row(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Columns and values; once they are ready."""
        values = self.found.values() if isinstance(self.found, HostCopy) else self.found
        cells, at = [], 0
        for count in self.counts:
            one = count == 1
            cells.append(float(values[at] if one else np.mean(values[at : at + count])))
            at += count
        return tuple(self.columns), tuple(cells)


class SecondaryOptimizers(Probe):
    """The secondary optimizers of one training."""

    name = "other optimizers"

    def __init__(self) -> None:
        self.wakes = NEVER
        self._known: dict[int, _SecondaryOptimizer] = {}
        self._stepped = False
        self._waiting: deque[SecondarySteps] = deque(maxlen=64)

    def reset(self) -> None:
        """Another training begins."""
        self.__init__()  # type: ignore[misc]  # all of it is state of one training

    def made_step(
        self,
        optimizer: torch.optim.Optimizer,
        losses: list[Loss],
        modules: Callable[[], Iterable[nn.Module]],
        *,
        norm: bool = True,
    ) -> None:
        """Called after a step of a secondary optimizer, with the losses since the last step of any.

        Each loss is a number or a tensor `[1]`. `modules` finds the live modules, for a name;
        `norm`: whether its gradients are read.
        """
        other = self._known.get(id(optimizer))
        if other is None or other.optimizer() is not optimizer:
            if other is None and len(self._known) >= MAX_OTHERS:
                return
            # One that is gone had the same id: this one takes its place, and its name if it can.
            self._known.pop(id(optimizer), None)
            name = self._name(optimizer, modules())
            other = self._known[id(optimizer)] = _SecondaryOptimizer(weakref.ref(optimizer), name)
        self._stepped, self.wakes = True, 0
        if len(other.norms) >= MAX_STEPS:
            return
        other.rate = discovery.rate(optimizer.param_groups[0], "lr")
        if losses:
            total: Loss = losses[0]
            for loss in losses[1:]:
                total = total + loss
            other.losses.append(total)
        found = _norm(optimizer) if norm and not is_recording() else None
        if found is not None:
            other.norms.append(found)

    def drain(self, step: int) -> list[SecondarySteps]:
        """What is ready to be sent, of this step of the primary and of earlier ones."""
        if self._stepped:
            self._stepped = False
            row = self._gather(step)
            if row is not None:
                self._waiting.append(row)
        ready = []
        while self._waiting and self._waiting[0].ready:
            ready.append(self._waiting.popleft())
        self.wakes = 0 if self._waiting else NEVER
        return ready

    def stepped(self, training: Training, step: int) -> None:
        """Send their values with this step of the main one."""
        for ready in self.drain(step):
            columns, values = ready.row()
            nonfinite = not all(map(math.isfinite, values))
            # The time of the primary's row, so that both are one.
            row = StepRow(ready.step, training.step_at_us, columns, values)
            training.step_row(row, urgent=nonfinite)

    def _gather(self, step: int) -> SecondarySteps | None:
        columns: list[str] = []
        counts: list[int] = []
        parts: list[Loss] = []
        for other in self._known.values():
            series: tuple[tuple[str, list[Loss]], ...] = (
                ("loss", other.losses),
                ("gradient_norm", list(other.norms)),
                ("lr", [] if other.rate is None else [other.rate]),
            )
            for column, numbers in series:
                if numbers:
                    columns.append(f"{column}.{other.name}")
                    counts.append(len(numbers))
                    parts += numbers
            other.losses, other.norms, other.rate = [], [], None
        if not columns:
            return None
        found: list[float] | HostCopy
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        home = next((t.device for t in tensors if t.device.type != "cpu"), None)
        if home is None:
            found = [float(part) for part in parts]
        else:
            with torch.no_grad():
                found = HostCopy(torch.cat([on_device(part, home) for part in parts]))
        return SecondarySteps(step, columns, counts, found)

    def _name(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> str:
        wanted = {id(p) for *_, p in discovery.parameters_of(optimizer)}
        taken = {other.name for other in self._known.values()}
        best, most = "", 0
        for module in modules:
            name = type([module, *discovery.unwrapped(module)][-1]).__name__.lower()
            if name in _PLAIN:
                continue
            held = sum(id(p) in wanted for p in module.parameters())
            # One that holds nothing else: the model that holds several nets is none of them.
            if held > most and held == sum(1 for _ in module.parameters()):
                best, most = name, held
        if best and best[:100] not in taken:
            return best[:100]
        numbered = (f"optimizer{number}" for number in itertools.count(len(self._known) + 1))
        return next(name for name in numbered if name not in taken)


def _norm(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The L2 norm of all its gradients together, on their device."""
    flat = []
    for *_, parameter in discovery.parameters_of(optimizer):
        if is_distributed(parameter):
            return None  # the rank has a part of it: the norm would be that part's
        if parameter.grad is not None:
            tensor = dense(parameter.grad)
            if tensor is not None and tensor.numel():
                flat.append(tensor)
    if not flat:
        return None
    with torch.no_grad():
        home = flat[0].device
        found: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([norms([tensor])[0].to(home) for tensor in flat])
        )
        return found
