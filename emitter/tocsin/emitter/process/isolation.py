"""The isolation between our hooks and the user's training."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from time import perf_counter, thread_time
from types import CodeType
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

REST: Final = 100
"""Optimizer steps after which a probe that has failed is tried again."""

TRIALS: Final = 3
"""How often a probe is tried again; then it stays off."""

FREQUENT: Final = frozenset(("losses", "clipping", "scaler", "batches"))
"""Probes that every step calls, for some microseconds: asking for CPU time would cost as much."""

BRIEF_S: Final = 100e-6
"""What one of their calls counts at most, seconds: beyond, others had the processor."""

_BY_THE_CLOCK: Final = FREQUENT | {"local_gradients"}

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def to_stderr(probe: str, reason: str) -> None:
    """A report for when no record can be sent."""
    sys.stderr.write(f"tocsin: {switched_off(probe, reason)}\n")


def switched_off(probe: str, reason: str) -> str:
    """The line for people."""
    return f"capture of {probe} was switched off ({reason}); training is not affected"


def from_signal(error: BaseException) -> bool:
    """Whether a signal handler of the user's has raised this while our code ran.

    Such an error is the user's own (a time limit, a pre-emption) and must get out. Never raises.
    """
    try:
        return _from_signal(error)
    # At the end of the stack or of memory there is no telling.
    except Exception:
        return False


def _from_signal(error: BaseException) -> bool:
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    interrupted, traceback = None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in handlers:
            return True
        # A handler that has put the one before it back is not known any more; but Python has handed
        # it the frame that it interrupted, which is the one that calls it.
        count = frame.f_code.co_argcount
        if interrupted is not None and count and not frame.f_code.co_filename.startswith(_OURS):
            given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[:count]]
            if any(value is interrupted for value in given):
                return True
        interrupted, traceback = frame, traceback.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    """The code that runs when this handler is called; None: it is none of Python's."""
    for _ in range(8):
        inner = getattr(handler, "func", None)  # functools.partial
        inner = getattr(handler, "__func__", None) if inner is None else inner
        if inner is None:
            break
        handler = inner
    code = getattr(handler, "__code__", None)
    if code is None:
        call = getattr(type(handler), "__call__", None)  # noqa: B004  (wanted is its code)
        code = getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) else None


class Isolation:
    """Calls our code such that nothing of it reaches the training.

    A probe that raises is switched off and reported; the others go on. It is tried again after
    `REST` steps, `TRIALS` times. The CPU time of this thread that is spent is added up in
    `seconds`, the time of each probe in `spent`. What a signal handler of the user's raises
    meanwhile goes on to the user.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.spent: dict[str, float] = {}
        self._busy = False
        self.off: dict[str, str] = {}
        """Probes that are off, with the reason; they are so until a trial has gone well."""
        self.came_back: dict[str, str] = {}
        """Probes that were off for a while, with the reason."""
        self.report: Callable[[str, str], None] | None = None
        self._unreported: list[str] = []
        self._steps = 0
        self._trial_at: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def run(
        self, probe: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """`function(...)`; None if it raises, or did so before and is not to be tried again yet.

        Raises only what a signal handler of the user's has raised, and what is no `Exception`.
        """
        tried = probe in self.off
        if tried and self.rests(probe):
            return None
        outermost = not self._busy
        clock = perf_counter if not outermost or probe in _BY_THE_CLOCK else thread_time
        began = clock()
        try:
            self._busy = True
            result = function(*args, **kwargs)
            if tried:
                self._is_back(probe)
            return result
        # An emitter hook's isolation: training goes on whatever happens in here.
        except Exception as error:
            if from_signal(error):
                raise
            try:
                self._failed(probe, f"{type(error).__name__}: {error}")
            # At the end of the stack or of memory even that fails, and must not be what gets out.
            except Exception:
                self.off[probe] = type(error).__name__
            return None
        finally:
            if outermost:
                self._busy = False
            lasted = clock() - began
            self.spent[probe] = self.spent.get(probe, 0.0) + lasted
            if outermost:
                self.seconds += min(lasted, BRIEF_S) if probe in FREQUENT else lasted

    def rests(self, probe: str) -> bool:
        """Whether a probe is off, and not to be tried now."""
        if probe not in self.off:
            return False
        return self._steps < self._trial_at.get(probe, sys.maxsize)

    def stepped(self, steps: int = 1) -> None:
        """An optimizer has made so many steps: what rests does so for as many less."""
        self._steps += steps

    def switch_off(self, probe: str, reason: str) -> None:
        """Call this probe no more, and report that once."""
        if probe in self.off:
            return
        self.off[probe] = reason
        self._unreported.append(probe)
        self.report_off()

    def report_off(self) -> None:
        """Report each probe that was switched off; again later what cannot be reported now.

        Raises only what a signal handler of the user's has raised.
        """
        while self._unreported and self.report is not None:
            probe = self._unreported[0]
            try:
                self.report(probe, self.off.get(probe, ""))
            # The report is our code too.
            except Exception as error:
                if from_signal(error):
                    raise
                return
            self._unreported.remove(probe)

    def reset(self) -> None:
        """Every probe is on again: another training begins, and may be of another kind."""
        self.off.clear()
        self.came_back.clear()
        self._unreported.clear()
        self._trial_at.clear()
        self._failures.clear()

    def _failed(self, probe: str, reason: str) -> None:
        failures = self._failures[probe] = self._failures.get(probe, 0) + 1
        again = failures <= TRIALS
        self._trial_at[probe] = self._steps + REST if again else sys.maxsize
        self.switch_off(probe, reason)

    def _is_back(self, probe: str) -> None:
        self.came_back[probe] = self.off.pop(probe)
        if probe in self._unreported:
            self._unreported.remove(probe)
