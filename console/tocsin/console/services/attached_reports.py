"""Reports for messages that attach one: made by a child process, as pictures are.

`tocsin report` reads all that the bus has of the run and draws it: a second or two of a core. In a
process of its own it delays nothing here, and whatever goes wrong there costs the attachment only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tocsin.schemas.process.own_python import python_command, python_environment

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 60.0
"""For one report, its time in the queue included."""

FRESH_S: Final = 30.0
"""So long a report is good for further messages about the same run."""

MAX_BYTES: Final = 5_000_000
"""Larger ones are not attached: many mail servers refuse them."""

_KEPT: Final = 8
_BEGINNING: Final = b"<!doctype html>"


class AttachedReports:
    """Makes reports of runs on one bus, one at a time.

    Args:
        config: the file or folder of the configuration; None: there is none.
    """

    def __init__(
        self,
        bus_url: str,
        config: Path | None,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] | None = None,
    ) -> None:
        self._words = ("--bus", bus_url, *(() if config is None else ("--config", str(config))))
        self._timeout_s = timeout_s
        self._clock = clock
        self._command = command or python_command("tocsin.console", "report")
        self._room = asyncio.Semaphore(1)
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    async def make(self, run_id: str) -> bytes | None:
        """The HTML of a report; None if it cannot be made in time, which is logged. Raises nothing
        but CancelledError.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                made_s, report = self._kept.get(run_id, (0.0, b""))
                if report and self._clock() - made_s <= FRESH_S:
                    return report
                report = await self._run(run_id)
        except (TimeoutError, OSError) as error:
            self._without(run_id, type(error).__name__)
            return None
        if not report.startswith(_BEGINNING) or len(report) > MAX_BYTES:
            self._without(
                run_id, f"{len(report)} bytes that are not a report" if report else "error"
            )
            return None
        self._kept[run_id] = (self._clock(), report)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return report

    async def _run(self, run_id: str) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *self._command, run_id, "--format", "html", "--output", "-", *self._words,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=python_environment(os.environ),
        )  # fmt: skip
        try:
            out, _ = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
            raise
        return out.lstrip() if process.returncode == 0 else b""

    @staticmethod
    def _without(run_id: str, reason: str) -> None:
        logger.warning("message without a report", extra={"run_id": run_id, "reason": reason})
