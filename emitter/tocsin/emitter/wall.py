"""The wall between our hooks and the user's training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def to_stderr(probe: str, reason: str) -> None:
    """A report for when no record can be sent."""
    sys.stderr.write(f"tocsin: capture of {probe} was switched off: {reason}\n")


class Wall:
    """Calls our code such that nothing of it reaches the training.

    A probe that raises is switched off for the rest of the process and reported once; the others
    go on. The time spent is added up in `seconds`, that of each probe in `spent`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.spent: dict[str, float] = {}
        self._busy = False
        self.off: dict[str, str] = {}
        self.report: Callable[[str, str], None] | None = None
        self._unsaid: list[str] = []

    def call(
        self, probe: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """`function(...)`; None if it raises, or did so before."""
        if probe in self.off:
            return None
        outermost = not self._busy
        began = perf_counter()
        try:
            self._busy = True
            return function(*args, **kwargs)
        # An emitter hook's wall: training goes on whatever happens in here.
        except Exception as error:
            try:
                self.switch_off(probe, f"{type(error).__name__}: {error}")
            # At the end of the stack or of memory even that fails, and must not be what gets out.
            except Exception:
                self.off[probe] = type(error).__name__
            return None
        finally:
            lasted = perf_counter() - began
            self.spent[probe] = self.spent.get(probe, 0.0) + lasted
            if outermost:
                self._busy = False
                self.seconds += lasted

    def switch_off(self, probe: str, reason: str) -> None:
        """Call this probe no more, and say so once."""
        if probe in self.off:
            return
        self.off[probe] = reason
        self._unsaid.append(probe)
        self.say_what_is_off()

    def say_what_is_off(self) -> None:
        """Report each probe that was switched off; again later what cannot be said now."""
        while self._unsaid and self.report is not None:
            probe = self._unsaid[0]
            try:
                self.report(probe, self.off.get(probe, ""))
            # The report is our code too.
            except Exception:
                return
            self._unsaid.remove(probe)
