"""The helper process of a training that `start()` watches, driven through its stdin.

The same protocol as under `tocsin run` (`tocsin.emitter.helper_process`), but without an event loop
and without starting it again: the training is our parent, not our child.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.emitter.enforcer import StopOrder
from tocsin.emitter.helper_process import DRAIN_S, NICE
from tocsin.emitter.settings import BUS, RUN_ID

MODULE: Final = "tocsin.console.helper"
KILL_S: Final = 2.0


def helper_command(
    run_id: str,
    bus_url: str,
    *,
    since_ms: int,
    config: Path | None,
    stop: bool,
    incarnation: str | None = None,
) -> tuple[str, ...]:
    """The command line of the helper of this run; with an incarnation it samples the node too."""
    command = [sys.executable, "-m", MODULE, "--run-id", run_id, "--bus", bus_url]
    command += ["--since-ms", str(since_ms)]
    if config is not None:
        command += ["--config", str(config)]
    if incarnation is not None:
        command += ["--incarnation", incarnation]
    if not stop:
        command.append("--no-stop")
    return tuple(command)


class HelperChild:
    """The helper, running. When this process dies it sees the end of its stdin and stops."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Start it. Raises OSError."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for name in (RUN_ID, BUS):  # it is told by its command line, and is no training itself
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
            )
        self._pid = os.getpid()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._popen.pid, NICE)
        _started.add(self)
        self._order(f"job {os.getpid()}")

    @property
    def pid(self) -> int:
        """The helper's."""
        return self._popen.pid

    def stop(self, order: StopOrder) -> None:
        """A rank was told to stop: let the helper end it if it does not leave. From any thread."""
        self._order(f"stop {order.model_dump_json()}")

    def left(self, pid: int) -> None:
        """That rank has left its loop. From any thread."""
        self._order(f"left {pid}")

    def drain(self, timeout_s: float = DRAIN_S) -> int | None:
        """The training is over: let it finish for at most `timeout_s`; its exit code, None if it
        had to be ended.
        """
        if os.getpid() != self._pid:
            return None
        self._order(f"drain {timeout_s:g}")
        until = time.monotonic() + timeout_s + KILL_S
        try:
            return self._popen.wait(timeout_s + KILL_S)
        except subprocess.TimeoutExpired:
            self._close()
        try:
            return self._popen.wait(max(0.1, until + KILL_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            return None
        finally:
            self._close()

    def _order(self, order: str) -> None:
        stdin = self._popen.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                stdin.write(f"{order}\n".encode())

    def _close(self) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()


_started: Final[weakref.WeakSet[HelperChild]] = weakref.WeakSet()


def _in_child() -> None:
    # A forked worker that outlives us would hold the pipe open, and the helper would never end.
    for helper in _started:
        helper._close()


os.register_at_fork(after_in_child=_in_child)
