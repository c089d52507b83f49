"""Where the time comes from: one place, so that tests can say what time it is."""

from __future__ import annotations

from typing import Protocol

from tocsin.schemas.monotonic_clock import unix_ms


class Clock(Protocol):
    """Says the time of day."""

    def now_ms(self) -> int:
        """Unix time in milliseconds. Never blocks."""
        ...


class SystemClock:
    """The machine's clock as it was when this process began; see `monotonic_clock`."""

    def now_ms(self) -> int:
        """Unix time in milliseconds."""
        return unix_ms()
