"""How long the end of a launch may take: one time for all its parts, so that no waits add up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LET_GO_S: Final = 3.0
"""What the end may take beyond `--drain`, all its parts together, seconds."""

MIN_PART_S: Final = 0.1
"""What each part gets in any case: enough to be closed in order where nothing hangs, seconds."""


class EndBudget:
    """Begins when the job is over. Before that no part is cut short."""

    def __init__(self, drain_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._drain_s = drain_s
        self._now_s = now_s
        self._began_s: float | None = None

    def start(self) -> None:
        """The job is over."""
        self._began_s = self._now_s()

    def drain_s(self) -> float:
        """How long rules and deliveries may be waited for, seconds."""
        return max(0.0, self._drain_s - self._passed_s())

    def left_s(self, limit_s: float) -> float:
        """`limit_s`, or what is left for the whole end if that is less, seconds."""
        if self._began_s is None:
            return limit_s
        left_s = self._drain_s + LET_GO_S - self._passed_s()
        return min(limit_s, max(MIN_PART_S, left_s))

    def _passed_s(self) -> float:
        return 0.0 if self._began_s is None else self._now_s() - self._began_s
