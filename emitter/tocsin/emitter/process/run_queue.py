"""What other processes take of this thread's time: it could run, and waits for a processor.

A step takes longer on a busy machine, and may not cost more for it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
"""Of the calling thread: nanoseconds on a processor, nanoseconds waiting for one, and turns."""


class RunQueue:
    """The share of its time that the calling thread has waited for a processor."""

    def __init__(self, path: Path = _SCHEDSTAT) -> None:
        self._path: Final = path
        self._waited_s, self._at_s = _waited_s(path), time.perf_counter()

    def share(self) -> float:
        """Since the last call, from 0 to 1; 0 where the system does not tell."""
        waited_s, now_s = _waited_s(self._path), time.perf_counter()
        waited_s, self._waited_s = waited_s - self._waited_s, waited_s
        lasted_s, self._at_s = now_s - self._at_s, now_s
        return min(1.0, max(0.0, waited_s / lasted_s)) if lasted_s > 0 else 0.0


def _waited_s(path: Path) -> float:
    try:
        return int(path.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
