"""How far apart looks are that cost more than a short step may.

Until the step `LATE` they are as near as each of them wants: what is wrong from the beginning is
found early. From there on a kind of look may cost `PART` of what a step may: the steps between two
follow from what the last ones have cost.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from tocsin.emitter.plan.budget import round_interval

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

LATE: Final = 1000
"""Until that step no look is spared."""

PART: Final = 0.05
"""Of the cost that a step is allowed: 1 µs of 20."""

MAX_SPACING: Final = 2000
"""Steps between two looks, at most, unless a probe wants them nearer."""


class Spacing:
    """Steps between two looks of a probe: `every`, from the step `LATE` on up to `most`."""

    def __init__(self, every: int, most: int = MAX_SPACING) -> None:
        self._every: Final = every
        self._most: Final = most
        self.steps = every
        """Steps to the next look, as it was chosen at the last."""
        self._training: Training | None = None
        self._probe = ""
        self._spent_s = 0.0
        self._costs: Final[deque[float]] = deque(maxlen=3)

    def start(self, training: Training, probe: str) -> None:
        """A training begins; what the looks cost is what the isolation counts for that probe."""
        self._training, self._probe = training, probe

    def checked(self, step: int) -> int:
        """This step was checked: how many steps on the next one is."""
        training = self._training
        if training is None:
            return self.steps
        spent_s = training.isolation.spent.get(self._probe, 0.0)
        self._costs.append(spent_s - self._spent_s)
        self._spent_s = spent_s
        if step >= LATE:
            # The cheapest of the last: a first look pays for much that comes once.
            wanted = min(self._costs) / (PART * training.schedule.budget.allowed_s)
            self.steps = min(self._most, round_interval(self.steps, wanted, self._every))
        return self.steps
