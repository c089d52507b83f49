"""The losses of the steps, as if each step had as many micro-batches as the first.

`loss` is the sum over the micro-batches of a step. Most frameworks divide each one's loss by their
number, so that the sum is a mean; others do not, and then it grows with the number. Ultralytics
accumulates more of them from step to step while it warms up: one at first, 64 / batch size later.
What a program does is not known, so of a step with more micro-batches than the first the lower
reading counts: for a loss above zero that of one that is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tocsin.schemas.records.frames import StepFrame


@dataclass(slots=True)
class StepLosses:
    """The losses of one series.

    Attributes:
        usual: micro-batches of its first step; 0: there was none yet.
    """

    usual: float = 0.0

    def losses(self, frame: StepFrame) -> Sequence[float]:
        """The losses of a frame, one for each of its steps; none if it has none."""
        found = frame.column("loss")
        if found is None:
            return ()
        losses: list[float] = found.tolist()
        counts = frame.column("micro_batches")
        if counts is None:
            self.usual = self.usual or 1.0
            return losses
        for i, count in enumerate(counts.tolist()):
            if not count > 1:  # one has no column, or NaN in it
                count = 1.0
            self.usual = self.usual or count
            if count > self.usual:
                losses[i] = min(losses[i], losses[i] * self.usual / count)
        return losses
