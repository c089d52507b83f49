"""The gradients that an optimizer is about to use, as deep as this step is to be looked at.

Blocks at each step where a CPU can afford it; their exact norms, when due or when the blocks have
jumped; full rows, when due or when something is not finite.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tocsin.emitter.agenda import BLOCKS, NORMS, Agenda
from tocsin.emitter.blocks import BlockReader, Blocks
from tocsin.emitter.host_copy import HostCopy
from tocsin.emitter.summaries import dense, norms
from tocsin.emitter.tensor_rows import TensorRows, Wanted
from tocsin.emitter.watched import Optimizers, Watched
from tocsin.schemas.telemetry import Floats

EXACT_AFTER_JUMP: Final = 4
"""Steps whose exact norm is read once the blocks have jumped."""

GRADIENTS: Final = "gradients"


@dataclass(slots=True)
class Reading:
    """What the gradients of one optimizer say at one step. All parts may be missing."""

    names: Sequence[str] = ()
    numel: Sequence[int] = ()
    norms: Floats | HostCopy | None = None
    blocks: Blocks | None = None
    rows: TensorRows | None = None
    scale: float = 1.0
    primary: bool = True
    parts: Mapping[str, int] | None = None
    """In how many parts over the ranks each is cut, where some are."""

    @property
    def ready(self) -> bool:
        """Whether the numbers are here; never waits."""
        here = not isinstance(self.norms, HostCopy) or self.norms.ready()
        return here and (self.rows is None or self.rows.ready)

    @property
    def exact(self) -> Floats | None:
        """The norm of each tensor, once ready; None where they were not all read."""
        if isinstance(self.norms, HostCopy):
            self.norms = self.norms.values().astype(np.float32)
        if self.norms is not None:
            return self.norms
        return self.rows.norms if self.rows is not None and self.rows.whole else None

    @property
    def bad(self) -> int:
        """How many tensors are known not to be finite, once ready."""
        if self.rows is not None and self.rows.whole:
            return int(self.rows.rows.nonfinite.sum())
        exact = self.exact
        if exact is not None:
            return int((~np.isfinite(exact)).sum())
        return 0 if self.blocks is None else self.blocks.bad

    def share_of_square(self, exact: Floats, world_size: int) -> float:
        """What this rank adds to the square of the norm of the whole gradients.

        A part that lies on several ranks is added by each of them, divided by their number.
        """
        parts = self.parts or {}
        names = self.names or (() if self.rows is None else self.rows.names)
        share = np.array([parts.get(name, 1) for name in names], np.float64) / world_size
        return float(np.square(exact.astype(np.float64)) @ share)


class GradientReader:
    """Reads the gradients of a training's optimizers."""

    def __init__(self, agenda: Agenda, optimizers: Optimizers) -> None:
        self._agenda = agenda
        self._optimizers = optimizers
        self._blocks: dict[int, BlockReader] = {}
        self._exact_until = 0
        self.skipped = 0
        """Tensors that could not be read so far: meta, quantised, …"""

    def read(self, watched: Watched, step: int, *, odd: bool, at_once: bool) -> Reading | None:
        """None if there are no gradients. `odd`: the loss is not finite; `at_once`: then, or if a
        block is not finite, all rows are read in this step.
        """
        gradients = [g for _, p in reversed(watched.parameters) if (g := p.grad) is not None]
        if not gradients:
            return None
        agenda, optimizer = self._agenda, watched.optimizer()
        reading = Reading(parts=watched.parts)
        reading.primary = optimizer is not None and self._optimizers.is_primary(optimizer)
        due = agenda.due(step).get(GRADIENTS, ())
        wanted = [Wanted(p.name, self._optimizers.chosen(watched, p), p.columns) for p in due]
        on_cpu = gradients[0].is_cpu
        exact = step < self._exact_until or agenda.is_due(NORMS, step)
        if on_cpu and not wanted and not odd and agenda.is_due(BLOCKS, step):
            began = time.perf_counter()
            reader = self._blocks.setdefault(id(optimizer), BlockReader())
            blocks = reading.blocks = reader.read(gradients)
            agenda.spent(BLOCKS, time.perf_counter() - began)
            odd = blocks.bad > 0
            if not odd and reader.jumped(blocks.norm):
                exact = True
                self._exact_until = step + EXACT_AFTER_JUMP
                agenda.alarmed(step)
        if odd and at_once and on_cpu:
            agenda.alarmed(step)
            if all(chosen is not None for _, chosen, _ in wanted):
                wanted.append(Wanted(GRADIENTS))
        if wanted:
            with agenda.costs(*(each.collection for each in wanted)):
                self._read_rows(reading, watched, wanted)
        if exact and (reading.rows is None or not reading.rows.whole):
            with agenda.costs(NORMS):
                self._read_norms(reading, watched)
        return reading

    def _flat(self, watched: Watched) -> tuple[list[str], list[torch.Tensor]]:
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

    def _read_rows(self, reading: Reading, watched: Watched, wanted: Sequence[Wanted]) -> None:
        names, flat = self._flat(watched)
        if names:
            reading.rows = TensorRows(names, flat, wanted, precision=True)

    def _read_norms(self, reading: Reading, watched: Watched) -> None:
        names, flat = self._flat(watched)
        if not names:
            return
        reading.names, reading.numel = names, [tensor.numel() for tensor in flat]
        home = flat[0].device
        with torch.no_grad():
            if all(tensor.device == home for tensor in flat):
                found = norms(flat)
            else:
                found = torch.stack([norms([tensor])[0].to(home) for tensor in flat])
        reading.norms = found.numpy() if home.type == "cpu" else HostCopy(found)
