"""A learning rate that is far too high shows at the first steps: they throw the weights away.

A step that changes weights by more than half of their size leaves little of how they began. That
alone may be well: weights that begin at next to nothing grow so. But where the loss doubles in the
steps after it, or is no number any more, it was not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.telemetry import StepFrame
from tocsin.stream_rules.whole_frames import Doubles

HALF: Final = 0.5
_ZERO_STARTED: Final = 1e-5
_LATER: Final = 10
_FIRST: Final = 20
_TIMES: Final = 2.0
_SMALL: Final = 1e-3


@dataclass(slots=True)
class FirstSteps:
    """The losses of the first steps, and the step that changed the weights so much."""

    rank: int | None = None
    losses: dict[int, float] = field(default_factory=dict)
    step: int | None = None
    ratio: float = 0.0
    worst: str = ""
    worst_ratio: float = 0.0
    tensors: int = 0
    told: bool = False

    def take_losses(self, frame: StepFrame) -> None:
        """Losses of the lowest rank, as long as they are the first ones."""
        column, rank = frame.column("loss"), frame.speaker.rank
        if column is None or frame.mode != "train" or len(self.losses) >= _FIRST:
            return
        if self.rank is not None and rank > self.rank:
            return
        if rank != self.rank:
            self.rank, self.losses = rank, {}
        self.losses.update(zip(frame.steps.tolist(), column.tolist(), strict=True))

    def take_updates(
        self, step: int, rows: tuple[str, ...], change: Doubles, size: Doubles
    ) -> None:
        """A summary of updates, of the first steps: norms of the changes, and of the weights."""
        # What began at zero is all change.
        with np.errstate(all="ignore"):
            ratio = change / size
        known = (size > 0) & np.isfinite(ratio) & (np.abs(ratio - 1) > _ZERO_STARTED)
        if self.step is not None or not known.any():
            return
        whole = math.sqrt(float((change[known] ** 2).sum()) / float((size[known] ** 2).sum()))
        median = float(np.median(ratio[known]))
        if min(whole, median) > HALF:
            worst = int(np.argmax(np.where(known, ratio, 0.0)))
            self.step, self.ratio, self.tensors = step, median, int(known.sum())
            self.worst, self.worst_ratio = rows[worst], float(ratio[worst])

    def ruined(self) -> tuple[int, float, float] | None:
        """Once: at which step which loss shows it, and the first loss; None: none does."""
        if self.told or self.step is None or not self.losses:
            return None
        first = self.losses[min(self.losses)]
        if not first >= _SMALL:
            return None
        for step, loss in sorted(self.losses.items()):
            after = self.step < step <= self.step + _LATER
            if after and (not math.isfinite(loss) or loss > _TIMES * first):
                self.told = True
                return step, loss, first
        return None
