"""The gradients that an optimizer is about to use, as deep as this step is to be looked at.

Blocks at each step where a CPU can afford it; their exact norms, when due or when the blocks have
jumped; full rows, when due or when something is not finite.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
from tocsin.emitter.plan.schedule import BLOCKS, NORMS, CaptureSchedule
from tocsin.emitter.probes.gradient_blocks import BlockReader, Blocks
from tocsin.emitter.statistics.async_copy import HostCopy, by_device
from tocsin.emitter.statistics.reductions import dense, norms
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted
from tocsin.schemas.records.frames import Floats

GRADIENTS: Final = "gradients"

MIXED_EVERY: Final = 64
"""Readings between two looks at whether a model on a GPU has gradients on the CPU, too."""


class Norms:
    """The L2 norms of tensors, each `[n]`, of one device or several. On a GPU they come later."""

    def __init__(self, flat: Sequence[torch.Tensor]) -> None:
        places = by_device(flat)
        self._number = len(flat)
        self._parts: list[tuple[list[int], Floats | HostCopy]] = []
        with torch.no_grad():
            for device, at in places.items():
                found = norms([flat[i] for i in at])
                self._parts.append((at, found.numpy() if device.type == "cpu" else HostCopy(found)))

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        copies = [part for _, part in self._parts if isinstance(part, HostCopy)]
        # All are asked: some kinds of device are ready only when asked a second time.
        return all([copy.ready() for copy in copies])

    def values(self) -> Floats:
        """The norms, `[tensors]`, in the order of the tensors; only if `ready`."""
        found = np.zeros(self._number, np.float32)
        for at, part in self._parts:
            found[at] = part.values() if isinstance(part, HostCopy) else part
        return found


@dataclass(slots=True)
class Reading:
    """The numbers of one optimizer's gradients at one step. All parts may be missing.

    `norms` are the L2 norms of `names`, `[names]`.
    """

    names: Sequence[str] = ()
    numel: Sequence[int] = ()
    norms: Norms | Floats | None = None
    blocks: Blocks | None = None
    rows: TensorRows | None = None
    scale: float | HostCopy = 1.0
    """What the gradients were multiplied by: a fused optimizer under a GradScaler divides by it."""

    primary: bool = True
    """Whether its optimizer is the one whose steps count."""

    is_primary: Callable[[], bool] | None = None
    """Asks that again."""

    parts: Mapping[str, int] | None = None
    """In how many parts over the ranks each is cut, where some are."""

    def settle(self) -> None:
        """The step is over: whose it was is known now."""
        if self.is_primary is not None:
            self.primary, self.is_primary = self.is_primary(), None

    @property
    def ready(self) -> bool:
        """Whether the numbers are here; never waits."""
        here = not isinstance(self.norms, Norms) or self.norms.ready
        known = not isinstance(self.scale, HostCopy) or self.scale.ready()
        return here and known and (self.rows is None or self.rows.ready)

    @property
    def has_numbers(self) -> bool:
        """Whether something of the gradients was read."""
        return any(part is not None for part in (self.norms, self.blocks, self.rows))

    @property
    def divisor(self) -> float:
        """What the numbers are to be divided by, once ready; never zero."""
        if isinstance(self.scale, HostCopy):
            self.scale = float(self.scale.values()[0])
        return self.scale or 1.0

    @property
    def exact(self) -> Floats | None:
        """The norm of each tensor, `[names]`, once ready; None where they were not all read."""
        if isinstance(self.norms, Norms):
            self.norms = self.norms.values()
        if self.norms is not None:
            return self.norms
        return self.rows.norms if self.rows is not None and self.rows.whole else None

    @property
    def bad(self) -> int | None:
        """How many tensors are known not to be finite, once ready; None: none was looked at."""
        if self.rows is not None and self.rows.whole:
            return int(self.rows.rows.nonfinite.sum())
        exact = self.exact
        if exact is not None:
            return int((~np.isfinite(exact)).sum())
        if self.rows is not None:
            return int(self.rows.rows.nonfinite.sum())
        return None if self.blocks is None else self.blocks.bad

    def share_of_square(self, exact: Floats, world_size: int) -> float:
        """What this rank adds to the square of the norm of the whole gradients, whose norms on this
        rank are `exact`, `[names]`.

        A part that is on several ranks is added by each of them, divided by their number.
        """
        parts = self.parts or {}
        names = self.names or (() if self.rows is None else self.rows.names)
        share = np.array([parts.get(name, 1) for name in names], np.float64) / world_size
        return float(np.square(exact.astype(np.float64)) @ share)


class GradientReader:
    """Reads the gradients of a training's optimizers."""

    def __init__(self, schedule: CaptureSchedule, optimizers: Optimizers) -> None:
        self._schedule = schedule
        self._optimizers = optimizers
        self._blocks: dict[int, BlockReader] = {}
        self._on_cpu: dict[int, tuple[int, bool]] = {}
        """By optimizer: its readings so far, and whether a gradient was on the CPU."""
        self._read_at = {BLOCKS: -1, NORMS: -1, GRADIENTS: -1}
        self.skipped = 0
        """Tensors that could not be read so far: meta, quantised, …"""

    def read(
        self, watched: WatchedOptimizer, step: int, *, nonfinite: bool, at_once: bool
    ) -> Reading | None:
        """Read the gradients of a step; None if there are none.

        `nonfinite`: the loss is not finite; `at_once`: then, or if a block is not finite, all rows
        are read in this step.
        """
        schedule, optimizer = self._schedule, watched.optimizer()
        due = schedule.due(step).get(GRADIENTS, ())
        exact = step < schedule.exact_until or schedule.is_due(NORMS, step)
        reading = Reading(parts=watched.parts)
        reading.is_primary = partial(self._is_primary, watched.optimizer)
        sampled = schedule.is_due(BLOCKS, step) and self._may_be_on_cpu(optimizer)
        if not (due or exact or nonfinite or sampled):
            return reading if watched.has_gradients else None
        gradients = [g for _, p in reversed(watched.parameters) if (g := p.grad) is not None]
        if not gradients:
            return None
        wanted = [Wanted(p.name, self._optimizers.chosen(watched, p), p.columns) for p in due]
        on_cpu = any(gradient.is_cpu for gradient in gradients)
        self._found(optimizer, on_cpu=on_cpu)
        if on_cpu and not wanted and not nonfinite and sampled:
            began = time.thread_time()
            reader = self._blocks.setdefault(id(optimizer), BlockReader())
            blocks = reading.blocks = reader.read(gradients)
            schedule.spent(BLOCKS, time.thread_time() - began, more=self._again(BLOCKS, step))
            nonfinite = blocks.bad > 0
            if not nonfinite and reader.jumped(blocks.norm):
                exact = True
                schedule.alarmed(step)
        if nonfinite and at_once and on_cpu and all(each.names is not None for each in wanted):
            wanted.append(Wanted(GRADIENTS))
        if wanted:
            names = (each.collection for each in wanted)
            with schedule.costs(*names, more=self._again(GRADIENTS, step)):
                self._read_rows(reading, watched, wanted)
        if exact and (reading.rows is None or not reading.rows.whole):
            with schedule.costs(NORMS, more=self._again(NORMS, step)):
                self._read_norms(reading, watched)
        return reading

    def _is_primary(self, optimizer: weakref.ref[torch.optim.Optimizer]) -> bool:
        """Asked once the step is over; where it has raised, the reading may outlive the optimizer,
        which it must not keep.
        """
        alive = optimizer()
        return alive is not None and self._optimizers.is_primary(alive)

    def _again(self, name: str, step: int) -> bool:
        """Whether another optimizer's were read at this step: all of them together are one pass."""
        before, self._read_at[name] = self._read_at[name], step
        return before == step

    def _may_be_on_cpu(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether some may lie there, of which blocks can be read. Looked at now and then: it
        rarely changes, and each look costs.
        """
        readings, on_cpu = self._on_cpu.get(id(optimizer), (0, True))
        self._on_cpu[id(optimizer)] = readings + 1, on_cpu
        return on_cpu or readings % MIXED_EVERY == 0

    def _found(self, optimizer: torch.optim.Optimizer | None, *, on_cpu: bool) -> None:
        readings, before = self._on_cpu.get(id(optimizer), (0, True))
        if on_cpu != before or (on_cpu and not self._schedule.reads_blocks):
            self._on_cpu[id(optimizer)] = readings, on_cpu
            self._schedule.reads_blocks = any(there for _, there in self._on_cpu.values())

    def _flat(self, watched: WatchedOptimizer) -> tuple[list[str], list[torch.Tensor]]:
        names, flat = [], []
        # Backward order: the gradient that was computed first stands first.
        for name, parameter in reversed(watched.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            tensor = dense(gradient)
            if tensor is None:
                self.skipped += 1
                continue
            names.append(name)
            flat.append(tensor)
        return names, flat

    def _read_rows(
        self, reading: Reading, watched: WatchedOptimizer, wanted: Sequence[Wanted]
    ) -> None:
        names, flat = self._flat(watched)
        if names:
            reading.rows = TensorRows(names, flat, wanted, precision=True)

    def _read_norms(self, reading: Reading, watched: WatchedOptimizer) -> None:
        names, flat = self._flat(watched)
        if not names:
            return
        reading.names, reading.numel = names, [tensor.numel() for tensor in flat]
        reading.norms = Norms(flat)
