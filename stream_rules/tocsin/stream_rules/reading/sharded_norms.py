"""The gradient norm of a model that is in parts on the ranks (FSDP, tensor, pipeline parallel).

Each rank sends the root of what it adds to the square of the norm; a step's norm is known once all
have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.frames import StepFrame

COLUMN: Final = "gradient_norm_local_part"

WAITING: Final = 64
"""Steps of which a part is missing still; the oldest are given up."""


@dataclass(slots=True)
class _Sum:
    square: float = 0.0
    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ShardedNorms:
    """The parts that have come, by step."""

    steps: dict[int, _Sum] = field(default_factory=dict)
    last_step: int = -1

    def complete(self, frame: StepFrame, world_size: int) -> Iterator[tuple[int, float]]:
        """The steps, with their norms, that a frame makes complete; each once, in order."""
        values = frame.column(COLUMN)
        if values is None:
            return
        for step, part in zip(frame.steps.tolist(), values.tolist(), strict=True):
            if step <= self.last_step:
                continue
            found = self.steps.setdefault(step, _Sum())
            if frame.origin.rank in found.ranks:
                continue
            found.ranks.append(frame.origin.rank)
            found.square += part**2
            if len(found.ranks) >= world_size:
                self.last_step = step
                self.steps = {n: each for n, each in self.steps.items() if n > step}
                yield step, math.sqrt(found.square)
        while len(self.steps) > WAITING:
            del self.steps[min(self.steps)]
