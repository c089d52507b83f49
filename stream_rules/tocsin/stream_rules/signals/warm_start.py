"""Whether a run begins anew or goes on, and how far its weights have moved since.

An optimizer without a past has, after its first step, averages that are the same multiple of each
gradient: 0.1 of it for Adam, all of it for momentum. In none of 24 programs did the multiples
differ between tensors then; a hundred steps later they differ by 0.5 to 30 %. What a run that goes
on has restored shows so, whatever it calls its first step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows
from tocsin.stream_rules.rule import Input, event, tensors

INPUTS: Final[tuple[Input, ...]] = (
    tensors("updates", optional=True),
    tensors("gradients", optional=True),
    tensors("optimizer_state", optional=True),
    event(RunStarted, optional=True),
)
"""What it reads."""

_AVERAGES: Final = ("exp_avg", "momentum_buffer")
_ALIKE: Final = 1e-3
_MIN_TENSORS: Final = 2


@dataclass(slots=True)
class WarmStart:
    """What the summaries of the lowest rank have told."""

    gradients: LowestRankRows = field(default_factory=LowestRankRows)
    states: LowestRankRows = field(default_factory=LowestRankRows)
    updates: LowestRankRows = field(default_factory=LowestRankRows)
    optimizer: str = ""
    first_step: int | None = None
    norms: dict[str, float] = field(default_factory=dict)
    averages: dict[str, float] = field(default_factory=dict)
    ratios: float = 0.0
    summaries: int = 0

    def add_start(self, data: RunData) -> None:
        """The class of the optimizer."""
        if isinstance(data, RunStarted) and data.role == "trainer" and data.optimizer:
            self.optimizer = self.optimizer or data.optimizer

    def add(self, frame: TensorFrame) -> None:
        """Summaries of gradients, updates or the optimizer's state."""
        if frame.collection == "updates":
            self._add_updates(frame)
            return
        if self.first_step is not None and frame.step > self.first_step:
            return
        of_state = frame.collection == "optimizer_state"
        whole = (self.states if of_state else self.gradients).assemble(frame)
        sizes = None if whole is None else whole.column("l2")
        if whole is None or sizes is None:
            return
        if not of_state and self.first_step is None:
            self.first_step = whole.step
        found = dict(zip(whole.rows, sizes.tolist(), strict=True))
        if of_state:
            self.averages = {
                name.rpartition(".")[0]: size
                for name, size in found.items()
                if name.rpartition(".")[2] in _AVERAGES
            }
        elif whole.step == self.first_step:
            self.norms = found

    def is_new(self) -> bool:
        """Whether the optimizer had no past at the first step, as far as that is known."""
        both = [name for name, norm in self.norms.items() if norm > 0 and name in self.averages]
        if len(both) < _MIN_TENSORS:
            # Without momentum it keeps nothing that could tell.
            return self.optimizer == "SGD" and not self.averages and bool(self.norms)
        parts = np.array([self.averages[name] / self.norms[name] for name in both])
        middle = float(np.median(parts))
        return middle > 0 and float(np.median(np.abs(parts / middle - 1))) < _ALIKE

    def moved(self, steps: int) -> float:
        """How far the weights have gone in so many steps: the sum of the steps' ratios of change
        to weight, of the median tensor. 0 if it is not known."""
        return steps * self.ratios / self.summaries if self.summaries else 0.0

    def _add_updates(self, frame: TensorFrame) -> None:
        whole = self.updates.assemble(frame)
        if whole is None or whole.step == self.first_step:
            return
        change, size = whole.column("update_l2"), whole.column("l2")
        if change is None or size is None:
            return
        with np.errstate(all="ignore"):
            ratio = change.astype(np.float64) / size
        ratio = ratio[np.isfinite(ratio) & (size > 0)]
        if len(ratio):
            self.ratios += min(float(np.median(ratio)), 1.0)
            self.summaries += 1
