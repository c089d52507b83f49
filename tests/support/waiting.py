"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SOON_S = 30.0
"""A bound where the fault would be to wait for minutes or for ever: a busy machine keeps it."""

HANGS_S = 200.0
"""After that long something hangs, also on a machine with ten times as much to do."""


def wait_until(
    condition: Callable[[], object], timeout_s: float = HANGS_S, what: str = "it is so"
) -> None:
    """Look every 10 ms until `condition()` is true; less often if a look takes long.

    Raises AssertionError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    began = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(min(max(0.01, 2 * (now - began)), 0.2))
        began = time.monotonic()


async def until(
    condition: Callable[[], object], timeout_s: float = HANGS_S, what: str = "it is so"
) -> None:
    """The same on an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
