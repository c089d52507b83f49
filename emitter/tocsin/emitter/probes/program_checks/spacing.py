"""How far apart looks are that cost more than a short step may.

Fewer of them where steps are short: as many in a second, then, as where steps take longer.
"""

from __future__ import annotations

import time
from typing import Final

LATE: Final = 1000
"""Until that step no look is spared: what is wrong from the beginning is found early."""


class Spacing:
    """Steps between looks: `every`; from the step `LATE` on `late_every`, while `every` steps take
    less than `every_s` seconds.
    """

    def __init__(self, every: int, late_every: int, every_s: float) -> None:
        self._every: Final = every
        self._late_every: Final = late_every
        self._every_s: Final = every_s
        self.steps = every
        """Steps to the next look, as it was chosen at the last."""
        self.by_steps = False
        """Whether no clock decides."""
        self._looked_s = 0.0

    def looked(self, step: int) -> int:
        """There was a look at this step: how many steps on the next one is."""
        now = time.perf_counter()
        lasted, self._looked_s = now - self._looked_s, now
        short = step >= LATE and lasted < self._every_s * self.steps / self._every
        self.steps = self._late_every if short and not self.by_steps else self._every
        return self.steps
