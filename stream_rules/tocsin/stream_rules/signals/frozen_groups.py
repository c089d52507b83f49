"""Which parameter groups rest: their learning rate is zero, or next to nothing, for a while.

A cyclic rate touches zero, a schedule ends there, and a group at zero is how people freeze a part
of a model: weights that stay where they are are no sign meanwhile. Next to nothing is less than
1e-4 of a group's own highest rate; a rate that is tiny from the start is none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.runs import RunData, RunStarted

_NEXT_TO_NOTHING: Final = 1e-4


@dataclass(frozen=True, slots=True)
class FrozenSince:
    """Whether all groups have rested since the last look, and how many tensors are in those that
    have, as far as the run has said."""

    everywhere: bool
    tensors: int


@dataclass(slots=True)
class FrozenGroups:
    """The groups by the column of their rate."""

    tensors: dict[str, int] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    now: dict[str, bool] = field(default_factory=dict)
    lately: dict[str, bool] = field(default_factory=dict)

    def add_start(self, data: RunData) -> None:
        """A trainer reports at its start how many tensors each group has."""
        if isinstance(data, RunStarted) and data.role == "trainer":
            for group in data.groups:
                self.tensors[f"lr.{group.index}"] = group.parameters

    def add_rates(self, frame: StepFrame) -> None:
        """Take the rates of some steps."""
        for name in frame.columns:
            rates = frame.column(name) if name.startswith("lr.") else None
            if rates is None or not len(rates):
                continue
            known = self.highest.get(name, 0.0)
            if len(rates) == 1 and 0.0 < rates[0] == known:
                # As nearly always: a record of one step, at the highest rate so far.
                self.now[name] = False
                self.lately.setdefault(name, False)
                continue
            highest = np.fmax(np.fmax.accumulate(rates), known)
            rests = (rates == 0) | (rates < _NEXT_TO_NOTHING * highest)
            if np.isfinite(highest[-1]):
                self.highest[name] = float(highest[-1])
            self.now[name] = bool(rests[-1])
            self.lately[name] = self.lately.get(name, False) or bool(rests.any())

    def inspect(self) -> FrozenSince:
        """Who has rested at any step since the last look."""
        lately, self.lately = self.lately, dict(self.now)
        resting = [name for name, rests in lately.items() if rests]
        return FrozenSince(
            everywhere=bool(lately) and len(resting) == len(lately),
            tensors=sum(self.tensors.get(name, 0) for name in resting),
        )
