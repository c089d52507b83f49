"""In the helper of `start()`, where there is no launcher: ends ranks that do not leave.

    told (by the listener) -> grace -> SIGTERM, grace -> SIGKILL

A rank that saves a checkpoint when its grace is over gets it once more, as from a launcher.
A rank that has left its loop gets no signal: its process may be a notebook, or go on to something
else. Only the one process gets it, never its group, which may be the user's shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Final, Literal

import psutil
from pydantic import Field

from tocsin.schemas.exit_codes import SIGNALLED
from tocsin.schemas.records.events import Data, Model, clip
from tocsin.schemas.records.fields import Id, Incarnation
from tocsin.schemas.records.frames import Who
from tocsin.schemas.records.stops.commands import StopEscalated, StopExited

KILLED_S: Final = 10.0
"""How long the end of a process is waited for after SIGKILL, seconds."""

AFTER_SAVE_S: Final = 5.0
"""How long a rank that was waited for as it saved may take to leave after it, seconds."""

_LOOK_S: Final = 0.05

_STEPS: Final[tuple[tuple[signal.Signals, Literal["SIGTERM", "SIGKILL"]], ...]] = (
    (signal.SIGTERM, "SIGTERM"),
    (signal.SIGKILL, "SIGKILL"),
)


class StopOrder(Model):
    """One rank of this node got a stop; its process is `pid`. On the helper's stdin, as JSON."""

    pid: int = Field(gt=0, lt=2**31)
    rank: int = Field(ge=0)
    world_size: int = Field(default=1, ge=1)
    incarnation: Incarnation
    command_id: Id
    issue_id: Id | None = None
    grace_s: float = Field(ge=0, le=86_400)


class _Answerer(Who):
    """The fields that each answer takes over from its order."""

    command_id: str
    issue_id: str | None


class Enforcer:
    """Sees to the stops that it hears of. On one event loop; `answer` puts events on the bus."""

    def __init__(self, run_id: str, answer: Callable[[Data], None]) -> None:
        self._run_id = run_id
        self._answer = answer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._saving: set[int] = set()

    @property
    def under_way(self) -> list[asyncio.Task[None]]:
        """One task per rank that is neither gone nor given up."""
        return [task for task in self._tasks.values() if not task.done()]

    def obey(self, order: StopOrder) -> None:
        """See to it that this process ends. One order per process counts while it is under way."""
        task = self._tasks.get(order.pid)
        if task is not None and not task.done():
            return
        try:
            # Holds the process's creation time: a signal never reaches another one of that pid.
            process = psutil.Process(order.pid)
        except psutil.Error:
            return
        self._tasks[order.pid] = asyncio.create_task(self._enforce(process, order), name="enforce")

    def left(self, pid: int) -> None:
        """The rank in this process has left its loop: nothing is to be enforced."""
        task = self._tasks.pop(pid, None)
        if task is not None:
            task.cancel()

    def saving(self, pid: int, *, on: bool) -> None:
        """A rank begins to write a checkpoint, or has ended it."""
        if on:
            self._saving.add(pid)
        else:
            self._saving.discard(pid)

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = self.under_way
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _enforce(self, process: psutil.Process, order: StopOrder) -> None:
        began = time.monotonic()
        if await _gone(process, order.grace_s):
            return
        # A write that is cut off is a torn checkpoint.
        if order.pid in self._saving and await self._gone_after_save(process, order):
            return
        waited_s = round(time.monotonic() - began, 1)
        who = _Answerer(
            run_id=self._run_id,
            incarnation=order.incarnation,
            rank=order.rank,
            world_size=order.world_size,
            command_id=order.command_id,
            issue_id=order.issue_id,
        )
        reason = f"rank {order.rank} did not leave within {waited_s:g} s"
        for number, how in _STEPS:
            try:
                process.send_signal(number)
                if number is signal.SIGTERM:
                    # A suspended process takes it only once it goes on.
                    process.send_signal(signal.SIGCONT)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                return
            self._answer(
                StopEscalated(
                    **who,
                    how=how,
                    reason=clip(reason, 500),
                )
            )
            patience_s = order.grace_s if number is signal.SIGTERM else KILLED_S
            if await _gone(process, patience_s):
                self._answer(
                    StopExited(
                        **who,
                        how=how,
                        # What it returned only its parent can see; this is what the signal means.
                        exit_code=SIGNALLED + number,
                    )
                )
                return
            reason = f"rank {order.rank} did not end within {patience_s:g} s of {how}"

    async def _gone_after_save(self, process: psutil.Process, order: StopOrder) -> bool:
        """Whether it ended while it saved, within the grace, or within `AFTER_SAVE_S` after it."""
        until = time.monotonic() + order.grace_s
        while order.pid in self._saving and time.monotonic() < until:
            if await _gone(process, 0.0):
                return True
            await asyncio.sleep(_LOOK_S)
        return await _gone(process, 0.0 if order.pid in self._saving else AFTER_SAVE_S)


async def _gone(process: psutil.Process, timeout_s: float) -> bool:
    """Whether it ended within that time; a zombie has."""
    until = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(psutil.AccessDenied):
            try:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    return True
            except psutil.NoSuchProcess:
                return True
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_LOOK_S)
