"""A loss against the one some steps before it, as SageMaker Debugger's LossNotDecreasing compares.

Looked at each time the run has gone on for `num_steps` steps, with the newest loss that is at least
so many steps older. It is rising when it is above that one by more than `increase_percent` of its
size, else flat when it is not below it by `diff_percent`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from tocsin.stream_rules.reading.rank_series import PointHistory

_CANDIDATES: Final = 64
"""Losses after a look of which the next look's other one is chosen: as many as steps may be missing
between two losses."""

Why = Literal["falling", "flat", "rising"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one look has seen; `row` looks in a row have seen the same, the first against
    `first_step`. `limit` is what the loss must have stayed below."""

    why: Why
    row: int
    first_step: int
    loss: float
    before_step: int
    before: float
    limit: float


@dataclass(slots=True)
class LaggedLoss:
    """What is remembered of the losses of one rank."""

    earlier: list[tuple[int, float]] = field(default_factory=list)
    why: str = ""
    row: int = 0
    first_step: int = 0
    losses: PointHistory = field(default_factory=PointHistory)

    def add(
        self,
        step: int,
        loss: float,
        *,
        num_steps: int,
        diff_percent: float,
        increase_percent: float,
    ) -> Comparison | None:
        """Take the next loss; a comparison if it is time for one."""
        if not self.earlier or step < self.earlier[0][0] + num_steps:
            if len(self.earlier) < _CANDIDATES:
                self.earlier.append((step, loss))
            return None
        before_step, before = [one for one in self.earlier if one[0] <= step - num_steps][-1]
        self.earlier = [(step, loss)]
        self.losses.append(step, loss)
        fallen_to = before - diff_percent / 100 * abs(before)
        risen_to = before + increase_percent / 100 * abs(before)
        # Equal losses have not fallen, whatever the tolerance.
        flat = loss > fallen_to or loss == before
        why: Why = "rising" if loss > risen_to else "flat" if flat else "falling"
        if why != self.why:
            self.why, self.row, self.first_step = why, 0, before_step
        self.row += 1
        limit = risen_to if why == "rising" else fallen_to
        return Comparison(why, self.row, self.first_step, loss, before_step, before, limit)
