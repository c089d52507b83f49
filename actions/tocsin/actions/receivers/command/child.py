"""Programs that the service runs: what they see of it, and how they are ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Final

KEPT: Final = ("HOME", "LANG", "LC_ALL", "PATH", "TZ", "USER")
"""What a program gets of our environment: all else may hold secrets."""

_GRACE_S: Final = 2.0
"""Between SIGTERM and SIGKILL."""


async def end_group(process: asyncio.subprocess.Process) -> None:
    """End a program that still runs, with all of the group that it leads."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
