"""CMD as a job: its own process group, the terminal, its end, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from tocsin.emitter.launch.forwarded_signals import (
    ENDING,
    TO_GROUP,
    TO_LEADER,
    ForwardedSignals,
    Interrupted,
)
from tocsin.emitter.launch.signal_ladder import AFTER_SAVE_S
from tocsin.emitter.launch.terminal import Terminal
from tocsin.emitter.process import process_group
from tocsin.emitter.process.process_group import Change, Reaper
from tocsin.schemas.exit_codes import NOT_EXECUTABLE, NOT_FOUND, SIGNALLED

SWEEP_S: Final = 5.0
"""What a job leaves in its group gets SIGTERM at once and SIGKILL after this long, seconds."""

LEAVE_S: Final = 20.0
"""The same where somebody ends the job with a signal: what CMD started may have to save. Slurm and
Kubernetes give 30 s by default, in which the launcher has to report the end, too."""

_POLL_S: Final = 0.02


class CannotStart(Exception):
    """CMD could not be started; `exit_code` is 127 or 126."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code: Final = exit_code


def check_program(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Look for the program of CMD before anything is announced that it would do.

    Raises:
        CannotStart: no such program.
    """
    program = command[0]
    folders = [""] if "/" in program else os.get_exec_path(environ)
    if not any(os.path.exists(os.path.join(folder, program)) for folder in folders):
        raise _not_found(program)


def _not_found(program: str) -> CannotStart:
    where = "" if "/" in program else " on PATH: expected a program, or a path like ./it"
    return CannotStart(f"{program}: not found{where}", NOT_FOUND)


def inherited_descriptors() -> frozenset[int]:
    """Descriptors above stderr that a program would get from us. What Python opens is not among
    them; before libraries open theirs, this is what was handed to us, as by `<(…)` of a shell.
    """
    try:
        names = os.listdir("/dev/fd")
    except OSError:  # nothing is mounted there
        return frozenset()
    found = set()
    for name in names:
        with contextlib.suppress(OSError):  # the one of the list itself is gone
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.add(int(name))
    return frozenset(found)


class Job:
    """CMD, running. To be made and used on one event loop, in the main thread."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        reaper: Reaper,
        terminal: Terminal | None = None,
        *,
        descriptors: Collection[int] = (),
    ) -> None:
        """Start it, in the foreground where the launcher is alone there. It gets these
        `descriptors`, too, as far as they are open still.

        Raises:
            CannotStart: no such program, or it cannot be executed.
        """
        self._terminal = terminal
        self._reaper = reaper
        self._wants_terminal = terminal is not None and not terminal.is_shared()
        lend = self._wants_terminal and terminal is not None and terminal.is_ours()
        try:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(environ),
                process_group=0,
                pass_fds=inherited_descriptors().intersection(descriptors),
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _not_found(command[0]) from error
        except (OSError, ValueError) as error:
            why = "not executable"
            if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
                why = "not a program (a script needs a first line like #!/bin/sh)"
            raise CannotStart(f"{command[0]}: {why} ({error})", NOT_EXECUTABLE) from error
        self.pid: Final = self._popen.pid
        self.group: Final = self.pid
        self.started_at: Final = time.monotonic()
        self.ended_at: float | None = None
        self.returncode: int | None = None
        self.passed_on: set[signal.Signals] = set()
        self.interrupted: Interrupted | None = None
        self._ended = asyncio.Event()
        self._handlers: ForwardedSignals | None = None
        reaper.watch(self.pid, self._changed)
        if lend and terminal is not None:
            terminal.lend(self.group)

    def use(self, handlers: ForwardedSignals) -> None:
        """Where to take SIGTSTP's default action from when the job is suspended."""
        self._handlers = handlers

    @property
    def exit_code(self) -> int | None:
        """CMD's exit code as a shell reports it, 128+n after signal n; None while it runs."""
        if self.returncode is None:
            return None
        return self.returncode if self.returncode >= 0 else SIGNALLED - self.returncode

    def duration_s(self) -> float:
        """How long it has run, or ran."""
        return (time.monotonic() if self.ended_at is None else self.ended_at) - self.started_at

    async def wait(self) -> int:
        """Wait for the end of CMD itself; returns `exit_code`."""
        await self._ended.wait()
        assert self.exit_code is not None
        return self.exit_code

    def wait_blocking(self) -> int:
        """Wait for CMD without an event loop: the last resort when ours has failed."""
        while self.returncode is None:
            self._reaper.reap()
            time.sleep(_POLL_S)
        assert self.exit_code is not None
        return self.exit_code

    def forward(self, number: signal.Signals) -> None:
        """Pass on a signal that the launcher got."""
        if self.returncode is not None:
            return
        self.passed_on.add(number)
        terminal = self._terminal if self._wants_terminal else None
        if number is signal.SIGCONT and terminal is not None and terminal.is_ours():
            terminal.lend(self.group)
        if number in TO_GROUP:
            process_group.signal_group(self.group, number)
        else:
            process_group.signal_process(self.pid, number)

    def terminate(self, number: signal.Signals, *, keeping: frozenset[int] = frozenset()) -> None:
        """SIGTERM or SIGKILL to the job's group; SIGKILL to all descendants but `keeping` too."""
        self._signal_group(number)
        if number is signal.SIGKILL:
            for pid in process_group.descendants(keeping):
                process_group.signal_process(pid, number)

    def _signal_group(self, number: signal.Signals) -> None:
        process_group.signal_group(self.group, number)
        if number is not signal.SIGKILL:
            # A suspended process takes SIGTERM only once it goes on.
            process_group.signal_group(self.group, signal.SIGCONT)

    async def sweep(
        self,
        *,
        everything: bool,
        keeping: frozenset[int] = frozenset(),
        saving: Callable[[], bool] = lambda: False,
        hurry: asyncio.Event,
    ) -> None:
        """End what CMD has left: its group, and with `everything` all its descendants.

        At once SIGTERM, later SIGKILL; returns when they are gone, or 2 s after SIGKILL. That comes
        after `SWEEP_S`; or after `LEAVE_S`, and up to twice that while one of them is `saving`, if
        the job was to end by a signal that CMD alone has got: for a training below a shell SIGTERM
        is the first word of it. `hurry`: without that.
        """
        began = time.monotonic()
        grace_s = LEAVE_S if self.passed_on & ENDING.intersection(TO_LEADER) else SWEEP_S
        number, until = signal.SIGTERM, began + grace_s
        signalled: set[int] = set()
        while True:
            self._reaper.reap()
            left = process_group.descendants(keeping) if everything else []
            group = process_group.group_exists(self.group)
            if not group and not left:
                return
            if group and self.group not in signalled:
                signalled.add(self.group)
                self._signal_group(number)
            for pid in left:
                if pid not in signalled:
                    signalled.add(pid)
                    process_group.signal_process(pid, number)
            now = time.monotonic()
            if number is signal.SIGTERM:
                if saving():
                    until = max(until, min(now + AFTER_SAVE_S, began + 2 * grace_s))
                if hurry.is_set():
                    until = min(until, began + SWEEP_S)
            if now > until:
                if number is signal.SIGKILL:
                    return
                number, until = signal.SIGKILL, now + 2.0
                signalled.clear()
            await asyncio.sleep(_POLL_S)

    def _changed(self, change: Change) -> None:
        if change.stopped_by is not None:
            self._suspended(change.stopped_by)
            return
        self.returncode = self._popen.returncode = change.returncode
        self.ended_at = time.monotonic()
        if self._terminal is not None:
            died = change.returncode is not None and change.returncode < 0
            lent = self._terminal.take_back(self.group, reset=died)
            if change.returncode == -signal.SIGINT:
                if lent:
                    self.interrupted = "group"
                elif signal.SIGINT in self.passed_on and self._terminal.is_ours():
                    self.interrupted = "launcher"
        self._ended.set()

    def _suspended(self, number: int) -> None:
        """Ctrl-Z, or a read from the background: suspend the launcher too, so the shell sees it."""
        terminal, handlers = self._terminal, self._handlers
        if terminal is None:
            return
        if number in (signal.SIGTTIN, signal.SIGTTOU):
            self._wants_terminal = True
            if terminal.is_ours():
                terminal.lend(self.group)
            if terminal.is_lent(self.group):  # perhaps since it has asked
                # A Ctrl-Z that has come since it was stopped waits, and SIGCONT discards it.
                again = process_group.is_pending(self.pid, signal.SIGTSTP)
                process_group.signal_group(self.group, signal.SIGCONT)
                if again:
                    process_group.signal_group(self.group, signal.SIGTSTP)
                return
        if handlers is None or number == signal.SIGSTOP:
            return
        terminal.take_back(self.group)
        # Where there is no shell to wake us (an orphaned group) the system ignores this SIGTSTP.
        handlers.stop_self(lambda: os.killpg(os.getpgrp(), signal.SIGTSTP))
        if terminal.is_ours():
            if self._wants_terminal:
                terminal.lend(self.group)
        elif number in (signal.SIGTTIN, signal.SIGTTOU):
            # Still in the background: to wake it would only have it stopped again, at once.
            return
        process_group.signal_group(self.group, signal.SIGCONT)
