"""The machine's clock, as records and commands have it."""

from __future__ import annotations

import time


def wall_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
