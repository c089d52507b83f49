"""How far one optimizer step moves each weight: its norm before and after, on a sample.

Before a step that is to be summarised up to 4,096 numbers of each tensor are copied (whole where it
is smaller, else 16 blocks of 256 in equal distance), after it the change is measured, and the copy
is gone. All copies together hold at most 2 % of the parameters, or 262,144 numbers where that
is more; if they would not fit, the tensors take turns. Nothing is written to a weight.

It is measured, not derived from what the optimizer remembers: for plain SGD a step is the rate
times the gradient, for Adam a formula of its momenta, but what becomes of it in the weight is less
where it is rounded away, and that is what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tocsin.emitter.plan.schedule import Due
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.arrays import Array, Doubles, narrowed
from tocsin.emitter.statistics.async_copy import HostCopy
from tocsin.emitter.statistics.cpu_rows import as_numpy
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import Counts, Floats

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training

BLOCKS: Final = 16
BLOCK: Final = 256
SAMPLE: Final = BLOCKS * BLOCK
MIN_VALUES: Final = 1 << 18
SHARE: Final = 0.02

UPDATE_COLUMNS: Final = ("l2", "update_l2")
"""Of a whole tensor, as estimated from the sample."""


@dataclass(slots=True, eq=False)
class WeightUpdates:
    """The norms of one step: on the host, or on their way."""

    names: list[str]
    numel: list[int]
    factors: list[float]
    host: Doubles
    """Norms and changes of the samples that are on the host, `[n, 2]`; they come first."""

    copy: HostCopy | None
    """Those of the others, `[2 * m]`: first all norms, then all changes."""

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return self.copy is None or self.copy.ready()

    def tables(self) -> Iterator[Table]:
        """The one of the norms."""
        yield Table("updates", *self.rows(), UPDATE_COLUMNS, ("numel",))

    def rows(self) -> tuple[tuple[str, ...], Floats, Counts]:
        """Names, UPDATE_COLUMNS `[names, 2]`, and `numel` `[names, 1]`, of the tensors whose norms
        are finite; once ready.
        """
        norms = self.host
        if self.copy is not None:
            norms = np.concatenate((norms, self.copy.values().reshape(2, -1).T))
        norms = norms * np.asarray(self.factors)[:, None]
        good = np.flatnonzero(np.isfinite(norms).all(axis=1))
        counts = np.asarray(self.numel, np.uint64)[good].reshape(-1, 1)
        return tuple(self.names[i] for i in good), narrowed(norms[good]), counts


class UpdateProbe(Probe):
    """Measures the change of weights in the steps at which a collection of weights is due."""

    name = "updates"
    of = "weights"

    def __init__(self) -> None:
        self._next = 0
        self._names: list[str] = []
        self._places: list[int] = []
        self._before: list[torch.Tensor | Array] = []
        self._numel: list[int] = []

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self._schedule = training.schedule

    def updating(self, watched: WatchedOptimizer, due: Due) -> None:
        """The optimizer whose steps count is about to change its weights."""
        plans = (*due.get("weights", ()), *due.get("biases", ()))
        with self._schedule.costs(*(plan.name for plan in plans)):
            self.before(watched.parameters)

    def read(
        self, step: int, watched: WatchedOptimizer, due: Due
    ) -> tuple[str, WeightUpdates] | None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost."""
        self.reads = NEVER
        with self._schedule.costs("weights", more=True):
            updates = self.after(watched.parameters)
        return None if updates is None else ("weights", updates)

    def dropped(self) -> None:
        """The step in progress is not made: its gradients were thrown away."""
        self.reset()

    def before(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The step is about to happen: copy samples of the parameters, of any shape, that have
        gradients.
        """
        self.reset()
        moving = [i for i, (_, p) in enumerate(parameters) if p.grad is not None]
        if not moving:
            return
        left = max(MIN_VALUES, int(SHARE * sum(parameters[i][1].numel() for i in moving)))
        start = self._next % len(moving)
        with torch.no_grad():
            for i in range(len(moving)):
                place = moving[(start + i) % len(moving)]
                name, parameter = parameters[place]
                flat = dense(parameter)
                if flat is None or flat.numel() == 0 or flat.dtype.itemsize == 1:
                    continue
                taken = min(flat.numel(), SAMPLE)
                if taken > left:
                    break
                left -= taken
                self._next = start + i + 1
                self._names.append(name)
                self._numel.append(flat.numel())
                self._places.append(place)
                if flat.is_cpu:
                    held = _on_host(flat)
                    # What was gathered from several places is a copy already.
                    self._before.append(held if held.base is None else held.copy())
                else:
                    self._before.append(_wide(_sample(flat)))

    def after(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> WeightUpdates | None:
        """The step has happened: what it has changed in these, of any shape. The copies are gone.

        They are given anew: a step that raises, and has no end, must keep none of them alive.
        """
        squares: list[tuple[float, float]] = []
        now: list[torch.Tensor] = []
        then: list[torch.Tensor] = []
        on_host: list[tuple[str, int, float]] = []
        elsewhere: list[tuple[str, int, float]] = []
        with torch.no_grad(), np.errstate(all="ignore"):
            for i, place in enumerate(self._places):
                if place >= len(parameters) or parameters[place][0] != self._names[i]:
                    continue  # the step has put others there
                # Read anew: a layout may force a copy, and a step may put other memory there.
                flat, before = dense(parameters[place][1]), self._before[i]
                on_device = isinstance(before, torch.Tensor)
                if flat is None or flat.numel() != self._numel[i] or flat.is_cpu == on_device:
                    continue
                n = flat.numel()
                if isinstance(before, torch.Tensor):
                    now.append(_wide(_sample(flat)))
                    then.append(before)
                    elsewhere.append((self._names[i], n, (n / before.numel()) ** 0.5))
                else:
                    held = _on_host(flat)
                    moved = held - before
                    squares.append((float(np.dot(held, held)), float(np.dot(moved, moved))))
                    on_host.append((self._names[i], n, (n / held.size) ** 0.5))
            self.reset()
            if not on_host and not elsewhere:
                return None
            copy = None
            if now:
                size = torch._foreach_norm(now)
                change = torch._foreach_norm(torch._foreach_sub(now, then))
                home = now[0].device
                cells = [norm.to(home, torch.float32) for norm in (*size, *change)]
                copy = HostCopy(torch.stack(cells))
        names, numel, factors = zip(*on_host, *elsewhere, strict=True)
        host = np.sqrt(np.array(squares, np.float64).reshape(-1, 2))
        return WeightUpdates(list(names), list(numel), list(factors), host, copy)

    def reset(self) -> None:
        """Drop the copies."""
        self._names, self._places, self._before, self._numel = [], [], [], []


def _sample(flat: torch.Tensor) -> torch.Tensor:
    n = flat.numel()
    if n <= SAMPLE:
        return flat
    apart = n // BLOCKS
    return flat[: apart * BLOCKS].view(BLOCKS, apart)[:, :BLOCK]


def _wide(view: torch.Tensor) -> torch.Tensor:
    """A copy of it, in float32 at least."""
    if view.dtype is torch.float64:
        return view.clone()
    wide: torch.Tensor = view.to(torch.float32, copy=True)
    return wide


def _on_host(flat: torch.Tensor) -> Array:
    """Its sample as one flat array, never to be written to; in float32 at least.

    NumPy's calls cost half of PyTorch's, and these are many and small.
    """
    if flat.dtype not in (torch.float32, torch.float64):
        return as_numpy(_sample(flat)).ravel()
    whole: Array = flat.numpy()
    if whole.size <= SAMPLE:
        return whole
    apart = whole.size // BLOCKS
    return whole[: apart * BLOCKS].reshape(BLOCKS, apart)[:, :BLOCK].ravel()
