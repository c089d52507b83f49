"""For tests of services: a clock that is moved by hand, and points at which a process dies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

CRASH_AT: Final = "TOCSIN_CRASH_AT"
"""Environment variable: `NAME:N` ends the process at the N-th pass (from 1) of the point NAME."""

CRASH_POINTS: Final = (
    "polled",
    "applied",
    "outputs_acknowledged",
    "snapshots_acknowledged",
    "committed",
)
"""The points of the worker, in their order. `actions` adds those of a delivery."""


def no_crash(name: str) -> None:
    """The crash points of a process that is not under test."""


class FakeClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Unix time in milliseconds."""
        return self._now_ms

    def advance(self, *, ms: int = 0, s: float = 0) -> int:
        """Go on by that much; returns the time then."""
        self._now_ms += ms + round(s * 1000)
        return self._now_ms


class CrashPoints:
    """Ends the process, as `kill -9` would, at the n-th pass of a named point.

    Hand it to a worker as `crash`. With `die` a test sees the moment instead.
    """

    def __init__(self, spec: str | None, *, die: Callable[[], None] | None = None) -> None:
        name, _, count = (spec or "").partition(":")
        self._name = name
        self._left = int(count or 1)
        self._die = die or _die
        self.passed: Counter[str] = Counter()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> CrashPoints:
        """As `TOCSIN_CRASH_AT` says; without it no point does anything."""
        return cls(environ.get(CRASH_AT))

    def __call__(self, name: str) -> None:
        """Called by the code under test at each point."""
        self.passed[name] += 1
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            self._die()


def _die() -> None:
    # As SIGKILL does: no handler runs, nothing is flushed.
    os._exit(137)
