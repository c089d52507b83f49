"""A learning rate that is far too high shows at the first steps: they throw the weights away.

A step that changes weights by more than half of their size leaves little of how they began. That
alone may be well: weights that begin at next to nothing grow so. But where the loss doubles in the
steps after it, or is no number any more, it was not. Of a smaller change a loss that is four times
as high says the same.

Where the loss does not rise, the size of the change decides. The first change of a matrix is close
to one of rank one, so that its norm is how much it can stretch what it is given, and what keeps its
scale stretches by about 1. Half of the weights of a model of many, changed by half of their size
and by a norm above 1, are those that the step has made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import StepFrame
from tocsin.stream_rules.reading.tensor_rows import Doubles

HALF: Final = 0.5
FIFTH: Final = 0.2
STRETCH: Final = 1.0
"""Norm of a change above which it outweighs what keeps its scale."""

MANY: Final = 8
"""Weights of a model from which on the change alone decides: large steps find a line or two."""

_ZERO_STARTED: Final = 1e-5
_LATER: Final = 10
_FIRST: Final = 20
TIMES: Final = 2.0
MORE_TIMES: Final = 4.0
_SMALL: Final = 1e-3


@dataclass(frozen=True, slots=True)
class RuinousStep:
    """A step that has ruined the weights, and the evidence."""

    reason: str
    step: int
    limit: float
    """Of the median ratio."""

    first_loss: float | None = None
    loss: float | None = None
    loss_limit: float | None = None


@dataclass(slots=True)
class InitialLearningRate:
    """The losses of the first steps, and the step that changed the weights so much."""

    rank: int | None = None
    losses: dict[int, float] = field(default_factory=dict)
    step: int | None = None
    ratio: float = 0.0
    whole: float = 0.0
    norm: float = 0.0
    worst: str = ""
    worst_ratio: float = 0.0
    tensors: int = 0
    reported: bool = False

    @property
    def thrown(self) -> bool:
        """Whether the step has changed half of the weights, and all together, by half."""
        return min(self.ratio, self.whole) > HALF

    def add_losses(self, frame: StepFrame) -> None:
        """Losses of the lowest rank, as long as they are the first ones."""
        column, rank = frame.column("loss"), frame.origin.rank
        if column is None or frame.mode != "train" or len(self.losses) >= _FIRST:
            return
        if self.rank is not None and rank > self.rank:
            return
        if rank != self.rank:
            self.rank, self.losses = rank, {}
        self.losses.update(zip(frame.steps.tolist(), column.tolist(), strict=True))

    def add_updates(self, step: int, rows: tuple[str, ...], change: Doubles, size: Doubles) -> None:
        """A summary of updates, of the first steps: norms of the changes, and of the weights."""
        # What began at zero is all change.
        with np.errstate(all="ignore"):
            ratio = change / size
        known = (size > 0) & np.isfinite(ratio) & (np.abs(ratio - 1) > _ZERO_STARTED)
        if not known.any():
            return
        whole = math.sqrt(float((change[known] ** 2).sum()) / float((size[known] ** 2).sum()))
        median = float(np.median(ratio[known]))
        if median > FIFTH and (min(median, whole) > HALF, median) > (self.thrown, self.ratio):
            worst = int(np.argmax(np.where(known, ratio, 0.0)))
            self.step, self.ratio, self.whole, self.tensors = step, median, whole, int(known.sum())
            self.norm = float(np.median(change[known]))
            self.worst, self.worst_ratio = rows[worst], float(ratio[worst])

    def ruined(self) -> RuinousStep | None:
        """Once: which step has thrown the weights away, and what shows it; None: none has."""
        if self.reported or self.step is None:
            return None
        found = self._by_loss(self.step)
        if found is None and self.tensors >= MANY and self.ratio > HALF and self.norm > STRETCH:
            found = RuinousStep(f"and by a norm of {self.norm:.2g}", self.step, HALF)
        self.reported = found is not None
        return found

    def _by_loss(self, at: int) -> RuinousStep | None:
        first = self.losses[min(self.losses)] if self.losses else math.nan
        if not first >= _SMALL:
            return None
        times, limit = (TIMES, HALF) if self.thrown else (MORE_TIMES, FIFTH)
        for step, loss in sorted(self.losses.items()):
            after = at < step <= at + _LATER
            if after and ((self.thrown and not math.isfinite(loss)) or loss > times * first):
                reason = f"and the loss went from {first:.4g} to {loss:.4g} at step {step}"
                return RuinousStep(reason, step, limit, first, loss, times * first)
        return None
