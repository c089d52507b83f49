"""What happens to a process that a stop has told to leave: it has its grace, then come signals.

    grace -> once more, while it saves a checkpoint -> SIGTERM, grace -> SIGKILL

The same for the launcher's job (`escalation`) and for a rank of `start()` (`enforcer`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Final, Literal, Protocol

Signalled = Literal["SIGTERM", "SIGKILL"]

KILLED_S: Final = 10.0
"""How long the end of a process is waited for after SIGKILL, seconds."""

AFTER_SAVE_S: Final = 5.0
"""How long what was waited for as it saved may take to leave after it, seconds."""

_POLL_S: Final = 0.02

_STEPS: Final[tuple[tuple[signal.Signals, Signalled], ...]] = (
    (signal.SIGTERM, "SIGTERM"),
    (signal.SIGKILL, "SIGKILL"),
)


class Leaving(Protocol):
    """A process, or a job, that was told to leave. `name` is for people: `the job`, `rank 3`."""

    @property
    def name(self) -> str:
        """What it is."""
        ...

    def late(self, waited_s: float) -> str:
        """Why it gets a signal, after so long."""
        ...

    def gone(self) -> bool:
        """Whether it has left. Looked at, never assumed."""
        ...

    def saving(self) -> bool:
        """Whether it writes a checkpoint: a write that is cut off is a torn one."""
        ...

    def send(self, number: signal.Signals, how: Signalled, reason: str) -> bool:
        """Send it that signal, and report why; False: there is nothing to send it to."""
        ...


async def end(leaving: Leaving, *, grace_s: float, term_grace_s: float) -> Signalled | None:
    """Wait `grace_s` until it has left, then send signals, with `term_grace_s` after SIGTERM.

    Returns the signal after which it was gone. None: it left by itself, or it is there still, or no
    signal can reach it.
    """
    began = time.monotonic()
    if await _gone_within(leaving, grace_s):
        return None
    waited_s = grace_s
    if leaving.saving():
        if await _gone_after_save(leaving, grace_s):
            return None
        waited_s = round(time.monotonic() - began, 1)
    reason = leaving.late(waited_s)
    for number, how in _STEPS:
        if not leaving.send(number, how, reason):
            return None
        patience_s = term_grace_s if number is signal.SIGTERM else KILLED_S
        if await _gone_within(leaving, patience_s):
            return how
        reason = f"{leaving.name} did not end within {patience_s:g} s of {how}"
    return None


async def _gone_within(leaving: Leaving, timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not leaving.gone():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _gone_after_save(leaving: Leaving, grace_s: float) -> bool:
    """Whether it went while it saved, within the grace, or within `AFTER_SAVE_S` after it."""
    until = time.monotonic() + grace_s
    while leaving.saving() and time.monotonic() < until:
        if leaving.gone():
            return True
        await asyncio.sleep(_POLL_S)
    return await _gone_within(leaving, 0.0 if leaving.saving() else AFTER_SAVE_S)
