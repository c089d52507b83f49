"""The controlling terminal, lent to the job while it runs.

Platform facts. A terminal sends Ctrl-C and Ctrl-Z to the process group in its foreground, and only
that group may read it; a reader of another group is stopped by SIGTTIN. The job has a group of its
own, so it must be in the foreground for stdin, pdb and Ctrl-C to work, and then Ctrl-C reaches it
once and the launcher not at all. `tcsetpgrp` by a process of a background group raises SIGTTOU,
whose default is to stop that process; while the signal is blocked the call simply works.

A shell that runs a loop or a script ends it at Ctrl-C only if the command died of SIGINT, and a
script only if it got the signal itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from typing import Final

import psutil


class Terminal:
    """The terminal that controls this session."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._own_group: Final = os.getpgrp()
        self._settings = termios.tcgetattr(descriptor)

    @classmethod
    def controlling(cls) -> Terminal | None:
        """The controlling terminal; None for a process without one."""
        try:
            descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(descriptor)
        except termios.error:
            os.close(descriptor)
            return None

    def is_ours(self) -> bool:
        """Whether the launcher's own group is in the foreground, so that it may lend it."""
        return self._foreground() == self._own_group

    def is_shared(self) -> bool:
        """Whether another of the launcher's group may want it: a pager, in a pipe with it. A job is
        lent it only once it wants it, then.
        """
        return not (os.isatty(0) and os.isatty(1)) and not _alone(self._own_group)

    def lend(self, group: int) -> None:
        """Put `group` into the foreground. Wakes nobody: a Ctrl-Z that has just come must stand."""
        self._set(group)

    def is_lent(self, group: int) -> bool:
        """Whether `group` is in the foreground."""
        return self._foreground() == group

    def take_back(self, group: int, *, reset: bool = False) -> bool:
        """Put the launcher's group into the foreground if `group` has it, and whether it had;
        `reset` the settings too.

        A job that was killed cannot restore what it changed (echo off in pdb, raw mode).
        """
        if not self.is_lent(group):
            return False
        self._set(self._own_group)
        if reset:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSANOW, self._settings)
        return True

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _foreground(self) -> int:
        try:
            return os.tcgetpgrp(self._descriptor)
        except OSError:
            return -1

    def _set(self, group: int) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(OSError):  # there is no such group any more
                os.tcsetpgrp(self._descriptor, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _alone(group: int) -> bool:
    """Whether this process is the only one of its group."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if pid != os.getpid() and os.getpgid(pid) == group:
                return False
    return True
