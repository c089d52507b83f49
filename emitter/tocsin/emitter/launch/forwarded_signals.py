"""Which signals the launcher passes on, and to whom.

Platform facts. A terminal sends INT, QUIT, TSTP (and a shell CONT) to a whole group; so do we.
TERM, HUP, USR1 and USR2 are sent by people and schedulers to one process, and a worker process
without a handler dies of USR1; so they go to CMD itself. What CMD leaves behind is ended later.

A signal that is ignored when the launcher starts (`nohup`, a background job of a script) stays
ignored, for the job too: a handler would be reset to the default by exec, an ignored signal not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, Literal

TO_GROUP: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
TO_LEADER: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals by which somebody ends a job: a job that dies of one was interrupted, it did not fail."""


Interrupted = Literal["group", "launcher"]
"""Who is to get SIGINT after the job died of Ctrl-C: our group, which has not got it as the job had
the terminal, or the launcher alone."""


def die_of_interrupt(interrupted: Interrupted) -> None:
    """Die of SIGINT as the job did, so that a shell ends its loop or script. Returns only where
    SIGINT ends no process: in the first one of a container.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(0 if interrupted == "group" else os.getpid(), signal.SIGINT)


class ForwardedSignals:
    """Handlers on the loop for these signals and SIGCHLD; `restore` puts back what was there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        forward: Callable[[signal.Signals], None],
        child_changed: Callable[[], None],
    ) -> None:
        """Install. Main thread only."""
        self._loop = loop
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        for number in (*TO_GROUP, *TO_LEADER):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN:
                continue
            self._before[number] = before
            loop.add_signal_handler(number, forward, number)
        self._before[signal.SIGCHLD] = signal.getsignal(signal.SIGCHLD)
        loop.add_signal_handler(signal.SIGCHLD, child_changed)
        self._forward = forward

    def stop_self(self, stop: Callable[[], None]) -> None:
        """Run `stop` with the default action of SIGTSTP in force; it returns when we go on."""
        if signal.SIGTSTP in self._before:
            self._loop.remove_signal_handler(signal.SIGTSTP)
        try:
            stop()
        finally:
            if signal.SIGTSTP in self._before:
                self._loop.add_signal_handler(signal.SIGTSTP, self._forward, signal.SIGTSTP)

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, before in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before)
        self._before = {}
