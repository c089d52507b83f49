"""Where the time comes from: one place, so that tests can say what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Says the time of day."""

    def now_ms(self) -> int:
        """Unix time in milliseconds. Never blocks."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Unix time in milliseconds."""
        return time.time_ns() // 1_000_000
