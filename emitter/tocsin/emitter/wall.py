"""The wall between our hooks and the user's training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Wall:
    """Calls our code such that nothing of it reaches the training.

    A probe that raises is switched off for the rest of the process and reported once; the others
    go on. The time spent is added up in `seconds`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._busy = False
        self.off: dict[str, str] = {}
        self.report: Callable[[str, str], None] | None = None

    def call(
        self, probe: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """`function(...)`; None if it raises, or did so before."""
        if probe in self.off:
            return None
        outermost, self._busy = not self._busy, True
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        # An emitter hook's wall: training goes on whatever happens in here.
        except Exception as error:
            self.switch_off(probe, f"{type(error).__name__}: {error}")
            return None
        finally:
            if outermost:
                self._busy = False
                self.seconds += time.perf_counter() - began

    def switch_off(self, probe: str, reason: str) -> None:
        """Call this probe no more, and say so once."""
        if probe in self.off:
            return
        self.off[probe] = reason
        if self.report is not None:
            try:
                self.report(probe, reason)
            # The report is our code too.
            except Exception:
                self.report = None
