"""In the helper of `start()`, where there is no launcher: ends ranks that do not leave.

What comes after its grace: `signal_ladder`, as from a launcher. A rank that has left its loop gets
no signal: its process may be a notebook, or go on to something else. Only the one process gets it,
never its group, which may be the user's shell.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass

import psutil
from pydantic import Field

from tocsin.emitter.launch import signal_ladder
from tocsin.emitter.launch.signal_ladder import Signalled
from tocsin.schemas.exit_codes import SIGNALLED
from tocsin.schemas.records.events import Data, Model, clip
from tocsin.schemas.records.fields import Id, Incarnation
from tocsin.schemas.records.frames import Who
from tocsin.schemas.records.stops.commands import StopEscalated, StopExited


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
        leaving = _LeavingRank(process, order, self._saving, self._answer, self._run_id)
        grace_s = order.grace_s
        how = await signal_ladder.end(leaving, grace_s=grace_s, term_grace_s=grace_s)
        if how is not None:
            # What it returned only its parent can see; this is what the signal means.
            code = SIGNALLED + signal.Signals[how]
            self._answer(StopExited(**leaving.who, how=how, exit_code=code))


@dataclass(frozen=True, slots=True)
class _LeavingRank:
    """The process of a rank that was told to leave: see `signal_ladder.Leaving`."""

    process: psutil.Process
    order: StopOrder
    pids_saving: Collection[int]
    answer: Callable[[Data], None]
    run_id: str

    @property
    def name(self) -> str:
        return f"rank {self.order.rank}"

    def late(self, waited_s: float) -> str:
        return f"{self.name} did not leave within {waited_s:g} s"

    @property
    def who(self) -> _Answerer:
        order = self.order
        return _Answerer(
            run_id=self.run_id,
            incarnation=order.incarnation,
            rank=order.rank,
            world_size=order.world_size,
            command_id=order.command_id,
            issue_id=order.issue_id,
        )

    def gone(self) -> bool:
        """Also if it is a zombie."""
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False

    def saving(self) -> bool:
        return self.order.pid in self.pids_saving

    def send(self, number: signal.Signals, how: Signalled, reason: str) -> bool:
        try:
            self.process.send_signal(number)
            if number is signal.SIGTERM:
                # A suspended process takes it only once it goes on.
                self.process.send_signal(signal.SIGCONT)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        self.answer(StopEscalated(**self.who, how=how, reason=clip(reason, 500)))
        return True
