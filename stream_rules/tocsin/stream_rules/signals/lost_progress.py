"""How much of what a run had learned is gone, and for how many losses.

With `now` the median of the newest losses, `lowest` the lowest such median so far and `start` what
the run began with, the share that is lost is (now - lowest) / (start - lowest). It means nothing
until the loss has fallen by a tenth of `start`, or by a
quarter where that is only what was seen first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

LEARNED: Final = 0.1
LEARNED_UNKNOWN: Final = 0.25
"""By which part of its start a loss must have fallen before anything can be lost; more where the
start is what was seen first: a run that goes on from a checkpoint has learned little since then,
and a spike of 75 public GPTs, let in at a third of their length, was twice taken for a loss."""

REGAINED: Final = 1 / 3
"""A loss that has come back by this part of its rise is on its way back."""

FALLS: Final = 0.04
"""So is one that still falls by this part of its rise: the next stage of a curriculum comes down
from 6.0 towards 3.0 by 0.05 to 0.09 of it in 250 losses, a 104B model that was given up by 0.03."""

FALLS_OVER: Final = 250
"""How long ago the loss is that it is compared with. Unit: losses."""

_EVERY: Final = 10
"""Which medians are kept of that time. Unit: losses."""

_MAX_NOTED: Final = FALLS_OVER // _EVERY + 1


@dataclass(slots=True)
class LostProgress:
    """The progress that one series of losses has lost.

    Counts are of losses, which a log may write every hundred steps.
    """

    lowest: float = math.inf
    lowest_step: int = 0
    highest: float = -math.inf
    """The highest median since the share was last below the lower limit."""
    share: float = 0.0
    since: int = 0
    since_ms: int = 0
    above_low: int = 0
    """For how many losses in a row the share has been above the lower limit."""
    above_high: int = 0
    noted: list[float] = field(default_factory=list)
    """Medians since then, the oldest first, over the last `FALLS_OVER` losses."""

    def update(
        self,
        step: int,
        now: float,
        start: float,
        *,
        low: float,
        high: float,
        at_ms: int,
        least: float = LEARNED,
    ) -> None:
        """Take the next median; `low` and `high` are limits of the share, `least` is the part of
        the start that must have been learned."""
        if now < self.lowest:
            self.lowest, self.lowest_step = now, step
        learned = start - self.lowest
        self.share = (now - self.lowest) / learned if learned > least * abs(start) else 0.0
        if self.share <= low:
            self.above_low = self.above_high = 0
            self.highest = -math.inf
            self.noted = []
            return
        if self.above_low == 0:
            self.since, self.since_ms = step, at_ms
        if self.above_low % _EVERY == 0:
            self.noted = [*self.noted, now][-_MAX_NOTED:]
        self.above_low += 1
        self.above_high = self.above_high + 1 if self.share > high else 0
        self.highest = max(self.highest, now)

    def comes_back(self, now: float) -> bool:
        """Whether the loss has already come back by a good part of its rise."""
        return self.highest - now > REGAINED * (self.highest - self.lowest)

    def falls(self, now: float) -> bool:
        """Whether the loss is clearly lower than `FALLS_OVER` losses ago (or where it rose, if that
        was later), or may be: a state that was saved by an earlier version has no such medians."""
        if len(self.noted) < min(_MAX_NOTED, (self.above_low + _EVERY - 1) // _EVERY):
            return True
        before = self.noted[0]
        return before - now > FALLS * (before - self.lowest)
