"""The helper process of a training that `start()` watches, driven through its stdin.

The same protocol as under `tocsin run` (`tocsin.emitter.launch.helper`), but without an event loop
and without starting it again: the training is our parent, not our child.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.emitter.launch.helper import DRAIN_S, NICE, helper_environment
from tocsin.emitter.process.environment import BUS, RUN_ID
from tocsin.schemas.process.own_python import python_command

MODULE: Final = "tocsin.console.services.helper"
KILL_S: Final = 2.0


def helper_words(
    run_id: str,
    bus_url: str,
    *,
    since_ms: int,
    config: Path | None,
    stop: bool,
    incarnation: str | None = None,
) -> tuple[str, ...]:
    """The order for the helper of this run; with an incarnation it samples the node too."""
    words = ["--run-id", run_id, "--bus", bus_url, "--since-ms", str(since_ms)]
    if config is not None:
        words += ["--config", str(config)]
    if incarnation is not None:
        words += ["--incarnation", incarnation]
    if not stop:
        words.append("--no-stop")
    return tuple(words)


def helper_command(words: Sequence[str]) -> tuple[str, ...]:
    """The command line of a helper with this order."""
    return python_command(MODULE, *words)


class Child:
    """A process of ours beside the training; it ends when its stdin does, so at our death too."""

    def __init__(self, command: Sequence[str], log: Path, passed: Sequence[int] = ()) -> None:
        """Start it; it inherits the descriptors in `passed`. Raises OSError."""
        environ = helper_environment(os.environ)
        for name in (RUN_ID, BUS):  # it is named by its command line, and is no training itself
            environ.pop(name, None)
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=out,
                stderr=out,
                env=environ,
                start_new_session=True,
                pass_fds=passed,
            )
        self._pid = os.getpid()
        _started.add(self)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._popen.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, rather than one that was forked into this."""
        return os.getpid() == self._pid

    def close(self, timeout_s: float = KILL_S) -> None:
        """EOF, and SIGKILL if it is still there after `timeout_s`; nothing in a fork of ours.

        Nobody else may hold its stdin any more: it would see no EOF.
        """
        if not self.is_ours:
            return
        self._close_stdin()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _close_stdin(self) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()


class HelperChild(Child):
    """The helper, running."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Start it. Raises OSError."""
        super().__init__(command, log)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._popen.pid, NICE)
        assert self._popen.stdin is not None
        # For the listener too: a helper that is frozen must hold up neither.
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._order(f"job {os.getpid()}")

    @property
    def orders(self) -> int | None:
        """The descriptor of its stdin, for who gives it orders too; None once it is closed."""
        stdin = self._popen.stdin
        return None if stdin is None or stdin.closed else stdin.fileno()

    def drain(self, timeout_s: float = DRAIN_S) -> int | None:
        """The training is over: let it finish for at most `timeout_s` and `KILL_S`; its exit code,
        None if it has not ended by then.
        """
        self._order(f"drain {timeout_s:g}")
        try:
            return self._popen.wait(timeout_s + KILL_S)
        except subprocess.TimeoutExpired:
            return None

    def _order(self, order: str) -> None:
        stdin = self._popen.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                stdin.write(f"{order}\n".encode())


_started: Final[weakref.WeakSet[Child]] = weakref.WeakSet()


def _in_child() -> None:
    # A forked worker that outlives us would hold the pipe open, and the child would never end.
    for child in _started:
        child._close_stdin()


os.register_at_fork(after_in_child=_in_child)
