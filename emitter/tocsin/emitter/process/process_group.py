"""Processes of a job: its group, its orphans, and whether they are really gone.

Platform facts. A process whose parent dies is given to the nearest ancestor that is a sub-reaper
(Linux, `prctl`), else to init. As one, the launcher sees the end of every descendant, those outside
the job's group too, and must reap them. A group exists as long as one process is in it, even a
zombie.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import psutil

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36


def become_subreaper() -> bool:
    """Have orphans of this process given to it; False where the system has no such thing."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> bool:
    """Name this process, in 15 bytes at most; False where the system has no such thing."""
    return _prctl(_PR_SET_NAME, name.encode())


def end_with_parent() -> bool:
    """Have SIGTERM sent to this process when its parent's thread that made it ends; False where the
    system has no such thing."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(what: int, value: int | bytes) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(what, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send to all processes of the group; False if there is none left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process was sent that signal and has not acted on it; False where nothing tells."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if (
                line.startswith(("SigPnd:", "ShdPnd:"))
                and int(line.split()[1], 16) >> (number - 1) & 1
            ):
                return True
    return False


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Send to one process; False if it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def group_exists(group: int) -> bool:
    """Whether a process is in the group, zombies included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_lives(pid: int) -> bool:
    """Whether that process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def descendants(excluding: Iterable[int] = ()) -> list[int]:
    """Pids of this process's descendants that run, without `excluding` and what is below those."""
    apart = set(excluding)
    found: list[int] = []

    def walk(process: psutil.Process) -> None:
        try:
            children = process.children()
        except psutil.Error:
            return
        for child in children:
            if child.pid in apart:
                continue
            if process_lives(child.pid):
                found.append(child.pid)
            walk(child)

    walk(psutil.Process())
    return found


@dataclass(frozen=True, slots=True)
class Change:
    """A child ended (`stopped_by` None) or was stopped."""

    pid: int
    returncode: int | None
    stopped_by: int | None = None


class Reaper:
    """Reaps every child of this process, and calls who watches one.

    To be called at SIGCHLD and, since several SIGCHLD can melt into one, whenever convenient.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[Change], None]] = {}

    def watch(self, pid: int, notify: Callable[[Change], None]) -> None:
        """Call `notify` for each stop of that child, and once for its end."""
        self._watched[pid] = notify

    def reap(self) -> None:
        """Take all changes that are there; never waits."""
        kinds = os.WEXITED | os.WSTOPPED | os.WNOHANG
        while True:
            try:
                # Looked at first, so that a child is reaped by its own pid: one that a library of
                # this process waits for meanwhile is not taken twice.
                found = os.waitid(os.P_ALL, 0, kinds | os.WNOWAIT)
                taken = None if found is None else os.waitid(os.P_PID, found.si_pid, kinds)
            except ChildProcessError:
                return
            if taken is None:
                return
            self._notify(taken.si_pid, taken.si_code, taken.si_status)

    def _notify(self, pid: int, code: int, status: int) -> None:
        notify = self._watched.get(pid)
        if code in (os.CLD_STOPPED, os.CLD_TRAPPED):
            if notify is not None:
                notify(Change(pid, None, status))
            return
        self._watched.pop(pid, None)
        if notify is not None:
            notify(Change(pid, status if code == os.CLD_EXITED else -status))
