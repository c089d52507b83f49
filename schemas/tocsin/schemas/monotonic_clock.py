"""Unix time that nobody sets: the clock as it was when this process began, monotonic from there.

All that is stamped or measured here goes by it. A clock that is set while a run goes on, by an
hour or ten years, ahead or back, would otherwise make a silence of a rank out of nothing, or hide
one. What it costs: a process that outlives such a change, or a suspended machine, shows the old
time until it ends.
"""

from __future__ import annotations

import time
from typing import Final

_BEGAN_NS: Final = time.time_ns() - time.monotonic_ns()


def unix_us() -> int:
    """Microseconds. Never goes back within a process."""
    return (_BEGAN_NS + time.monotonic_ns()) // 1000


def unix_ms() -> int:
    """Milliseconds. Never goes back within a process."""
    return (_BEGAN_NS + time.monotonic_ns()) // 1_000_000
