"""`tocsin rules --workers N`: so many processes of one service, started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.runtime.shutdown import PART_BUDGET_S, stop_signals
from tocsin.schemas.exit_codes import FAILED, WRONG_USAGE
from tocsin.schemas.process.own_python import python_command, python_environment

logger = logging.getLogger(__name__)

END_S: Final = 4 * PART_BUDGET_S
"""How long a worker may take to end before it is killed: longer than all its own budgets."""

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_SOUND_S: Final = 60.0
"""One that ran for so long did not fail at its start."""


@dataclass(slots=True)
class Restarts:
    """How long to wait before a worker is started again. Pure."""

    pause_s: float = _FIRST_PAUSE_S
    worked: bool = False
    """Whether it has been started well before."""

    def ended(self, code: int, ran_s: float) -> float | None:
        """The pause, seconds; None: it would end in the same way, so nobody starts it again.

        One that has worked before ends wrongly configured because the file has changed since. The
        others still work by the file from before, and this one shall when the file is right again.
        """
        if code == WRONG_USAGE and not self.worked and ran_s < _SOUND_S:
            return None
        self.worked = True
        if ran_s >= _SOUND_S:
            self.pause_s = _FIRST_PAUSE_S
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, _LONGEST_PAUSE_S)
        return pause_s


class Supervisor:
    """Runs one process for each command line; SIGHUP is passed on.

    Args:
        commands: programs with their arguments.
        end_s: seconds that a process has to end after SIGTERM.
    """

    def __init__(self, commands: Sequence[Sequence[str]], *, end_s: float = END_S) -> None:
        self._commands = [tuple(command) for command in commands]
        self._end_s = end_s
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, or until one cannot be started. The exit code: 0, 1 if a process
        had to be killed, 2 if one was called or configured wrongly."""
        loop = asyncio.get_running_loop()
        with stop_signals(self._stopping):
            loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
            try:
                await asyncio.gather(
                    *(self._keep(number, words) for number, words in enumerate(self._commands))
                )
            finally:
                loop.remove_signal_handler(signal.SIGHUP)
        return self._code

    async def _keep(self, number: int, words: Sequence[str]) -> None:
        restarts, loop = Restarts(), asyncio.get_running_loop()
        while not self._stopping.is_set():
            began_s = loop.time()
            process = await asyncio.create_subprocess_exec(
                *words, env=python_environment(os.environ)
            )
            self._running[number] = process
            logger.info("worker %d is process %d", number, process.pid, extra={"action": "start"})
            code = await self._wait(process)
            del self._running[number]
            if self._stopping.is_set():
                return
            pause_s = restarts.ended(code, loop.time() - began_s)
            if pause_s is None:
                self._code = code
                self._stopping.set()
                return
            logger.warning(
                "worker %d ended with %d, it is started again in %g s",
                number,
                code,
                pause_s,
                extra={"action": "restart"},
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        """Until it ends, by itself or because all are to end. Its exit code."""
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait({ended}, timeout=self._end_s)
            if not ended.done():
                logger.error("process %d does not end, and is killed", process.pid)
                self._code = FAILED
                process.kill()
        return await ended

    def _pass_on(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def worker_commands(
    words: Sequence[str],
    *,
    workers: int,
    parent: int,
    http: tuple[str, int] | None,
    member: str | None,
) -> list[list[str]]:
    """The command line of each worker; worker i serves the i-th port from `http` on, and is the
    member `member`-i. `parent` is the process with which they end. Pure."""
    commands = []
    for number in range(workers):
        more = ["--parent", str(parent)]
        if http is not None:
            host, port = http
            more += [
                "--http",
                f"[{host}]:{port + number}" if ":" in host else f"{host}:{port + number}",
            ]
        if member is not None:
            more += ["--member", f"{member}-{number}"]
        commands.append([*python_command("tocsin.console", *words, *more)])
    return commands
