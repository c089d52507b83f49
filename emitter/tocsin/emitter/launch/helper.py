"""The helper of one run: one niced process with sampler, rules and actions, kept alive.

Protocol, on the helper's stdin (text lines; the helper ignores words that it does not know):

    job PID     the job runs as this process: what the sampler looks at
    drain S     the job is over: work off what is there, for S seconds at most, then exit with 0
                (all deliveries final) or 3 (something is left in the ledger)
    stop JSON   a rank of this node got a stop (`tocsin.emitter.launch.enforcer.StopOrder`):
                end its process if it does not leave. Only where there is no launcher, which does
                so itself
    left PID    that rank has left its loop: it gets no signal
    saving PID  that rank writes a checkpoint, and gets its grace once more; `saved PID`: no more
    EOF         the launcher is gone: stop now, in order, once the stops under way are carried out

A helper that was started anew gets the orders so far once more. It has a session of its own and
no terminal, so no Ctrl-C reaches it; stdout and stderr go to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tocsin.bus.embedded.location import make_folder
from tocsin.emitter.launch.forked import ONE_THREAD, can_fork, fork
from tocsin.emitter.process.process_group import Change, Reaper, signal_process
from tocsin.schemas.process.own_python import python_environment

NAME: Final = "tocsin-helper"
"""What `ps -o comm` and `top` call it; the command line of a fork is that of the launcher."""

NICE: Final = 3
"""What it takes of the cores is the same with any niceness, only later: with 10, beside ten busy
processes, a stop waited for up to two seconds for it; with 3 for a third of a second.
"""

DRAIN_S: Final = 15.0
"""How long, after the job, rules and deliveries are waited for by default, seconds."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
HEALTHY_S: Final = 30.0
"""A helper that lived this long is started again without delay growing, seconds."""

DRAINED: Final = frozenset({0, 3})


def helper_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a helper. Lists folders: may block."""
    return {**python_environment(environ), **ONE_THREAD}


class HelperProcess:
    """Starts the helper, and again when it dies, until it has drained or is closed."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        reaper: Reaper,
        log: Path,
        print_line: Callable[[str], None],
    ) -> None:
        """`environ` is what `helper_environment` gives."""
        self.restarts = 0
        self.returncode: int | None = None
        self.pid: int | None = None
        """Of the helper that was started last."""
        self._command = list(command)
        self._environ = environ
        self._reaper = reaper
        self.log: Final = log
        self._print_line = print_line
        self._orders: list[str] = []
        self._stdin: int | None = None
        self._ended = asyncio.Event()
        self._done = asyncio.Event()
        self._closing = False

    def fork(self, serve: Callable[[], int]) -> None:
        """Start it as a fork of this process, which saves its imports; only before there is a
        thread or a loop. Where that cannot be done it does nothing, and `start` is to be called.
        """

        def niced() -> int:
            _be_nice(0)
            return serve()

        with contextlib.suppress(OSError):
            if can_fork():
                make_folder(self.log)
                with self._pipe() as (reading, writing), self.log.open("ab") as log:
                    pid = fork(niced, self._environ, reading, NAME, log.fileno())
                    self._attach(pid, writing)

    def start(self) -> None:
        """Start it once, if it was not forked; `keep` does so again. Raises OSError."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self._pipe() as (reading, writing), self.log.open("ab") as log:
            popen = subprocess.Popen(
                self._command,
                stdin=reading,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )
            # The reaper takes its end; without this, Popen would warn that nobody has.
            popen.returncode = 0
            _be_nice(popen.pid)
            self._attach(popen.pid, writing)

    @contextlib.contextmanager
    def _pipe(self) -> Iterator[tuple[int, int]]:
        """The two ends of the helper's stdin: ours stays open if it was started."""
        reading, writing = os.pipe()
        try:
            yield reading, writing
        finally:
            os.close(reading)
            if self._stdin != writing:
                os.close(writing)

    def _attach(self, pid: int, stdin: int) -> None:
        self.pid, self._stdin = pid, stdin
        self.returncode = None
        self._ended.clear()
        self._reaper.watch(pid, self._changed)
        os.set_blocking(stdin, False)
        for order in self._orders:
            self._write(order)

    async def keep(self) -> None:
        """Start it again whenever it dies, with growing pauses, until it has drained."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            await self._ended.wait()
            if self._closing or self._finished():
                self._done.set()
                return
            if time.monotonic() - began > HEALTHY_S:
                pause_s = FIRST_PAUSE_S
            if self.restarts == 0:
                self._print_line(
                    f"the helper exited with {self.returncode}; restarting it ({self._why()})"
                )
            self.restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if self._closing:
                return
            with contextlib.suppress(OSError):
                self.start()

    def job_started(self, pid: int) -> None:
        """Tell it the job's pid."""
        self._order(f"job {pid}")

    def drain(self, timeout_s: float) -> None:
        """Order it to finish."""
        self._order(f"drain {timeout_s:.1f}")

    @property
    def has_drained(self) -> bool:
        """Whether it has exited as `drain` asked; `returncode` is 0 if all was done."""
        return self._done.is_set()

    @property
    def ended_well(self) -> bool:
        """Whether it drained as ordered and never had to be started again."""
        return self.restarts == 0 and self.returncode in DRAINED

    async def close(self, timeout_s: float) -> None:
        """Let go of it: EOF, and SIGKILL if it is still there after `timeout_s`."""
        self._closing = True
        if self.pid is None:
            return
        self._shut()
        if self.returncode is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
            except TimeoutError:
                signal_process(self.pid, signal.SIGKILL)

    def _finished(self) -> bool:
        asked = any(order.startswith("drain") for order in self._orders)
        return asked and self.returncode in DRAINED

    def _order(self, order: str) -> None:
        self._orders.append(order)
        self._write(order)

    def _write(self, order: str) -> None:
        if self._stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._stdin, f"{order}\n".encode())

    def _shut(self) -> None:
        stdin, self._stdin = self._stdin, None
        if stdin is not None:
            os.close(stdin)

    def _changed(self, change: Change) -> None:
        if change.stopped_by is not None:
            return
        self.returncode = change.returncode
        self._shut()
        self._ended.set()

    def _why(self) -> str:
        try:
            lines = self.log.read_bytes()[-2_000:].decode(errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{self.log}: {last}" if last else f"see {self.log}"


def _be_nice(pid: int) -> None:
    """Lower the priority of a process (0: this one) that has one thread; later ones inherit it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
