"""Who belongs to the job on this node, as its processes report by datagram."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.unwatched import LINES

BEFORE_UPDATE: Final = "before_update"
"""Marks the word of a rank that has left before an update."""

KEPT: Final = 100
"""Trainings whose ranks are known at once; of older ones that are over, only their steps are."""

_MAX_UNWATCHED: Final = 10_000
_MAX_PID: Final = 2**22
_MAX_NUMBER: Final = 2**53
_NUMBERS: Final = ("rank", "world_size", "restart_count", "training", "step")
_INCARNATION: Final = re.compile(r"[A-Za-z0-9._:@+=-]{0,64}")


@dataclass(slots=True)
class Trainer:
    """A rank of a training on this node. `left_at` is the step at which it left for a stop, or,
    if `early`, before an update of its own accord; `saving`: it writes a checkpoint now."""

    pid: int
    rank: int
    world_size: int
    incarnation: str
    restart_count: int
    training: int
    socket: str
    finished: bool = False
    saving: bool = False
    left_at: int | None = None
    early: bool = False
    last_step: int = -1


@dataclass(slots=True)
class Agent:
    """A torchrun agent on this node."""

    pid: int
    socket: str
    blocked: bool = False


class Members:
    """The processes of one job on one node. `first` is its incarnation before any training."""

    def __init__(self, first: str, lives: Callable[[int], bool]) -> None:
        self.first: Final = first
        self.pythons = 0
        self.agents: dict[int, Agent] = {}
        self.unwatched: dict[str, set[int]] = {}
        """Kinds of trainings that are not watched, and the processes that have reported them."""
        self._lives = lives
        self._newest = first
        self._incarnations = {first}
        self._ranks: dict[str, list[Trainer]] = {}
        self._steps_before = 0
        self._changed = asyncio.Event()

    @property
    def incarnation(self) -> str:
        """The incarnation of the newest training with a registered rank, else the job's first."""
        return self._newest

    @property
    def world_size(self) -> int:
        """The world size of the newest training."""
        ranks = self.ranks(self._newest)
        return ranks[-1].world_size if ranks else 1

    def incarnations(self) -> AbstractSet[str]:
        """All of this job so far; a view."""
        return self._incarnations

    def ranks(self, incarnation: str) -> list[Trainer]:
        """The registered ranks of a training; the last `KEPT` trainings are known."""
        return self._ranks.get(incarnation, [])

    def living(self, incarnation: str) -> list[Trainer]:
        """Ranks of that training that are in it still."""
        return [
            trainer
            for trainer in self.ranks(incarnation)
            if not trainer.finished and self._lives(trainer.pid)
        ]

    def left_early(self, incarnation: str) -> list[Trainer]:
        """Ranks of that training that have left before an update."""
        return [trainer for trainer in self.ranks(incarnation) if trainer.early]

    def with_pid(self, pid: int, incarnation: str = "") -> list[Trainer]:
        """The ranks of that process, in one training or in all."""
        named = [self.ranks(incarnation)] if incarnation else self._ranks.values()
        return [each for ranks in named for each in ranks if each.pid == pid]

    def training_over(self) -> bool:
        """Whether there was a training and the newest one has ended."""
        return bool(self._ranks) and not self.living(self.incarnation)

    def unblocked(self) -> list[Agent]:
        """Agents that may still start workers again."""
        return [
            agent for agent in self.agents.values() if not agent.blocked and self._lives(agent.pid)
        ]

    def steps(self) -> int:
        """Steps that the ranks reported, the most of a rank, over all trainings."""
        return self._steps_before + sum(_steps(ranks) for ranks in self._ranks.values())

    def receive(self, message: datagrams.Message) -> bool:
        """Take one message; False if it is not understood, which changes nothing."""
        if not _sound(message):
            return False
        match message["kind"], message.get("role"):
            case "hello", "trainer":
                self._trainer(message)
            case "hello", "agent":
                pid = datagrams.number(message, "pid")
                self.agents[pid] = Agent(pid, datagrams.text(message, "socket"))
                self.pythons += 1
            case "hello", _:
                self.pythons += 1
            case "restart_blocked", _:
                agent = self.agents.get(datagrams.number(message, "pid"))
                if agent is not None:
                    agent.blocked = True
            case "unwatched", _:
                self._unwatched(datagrams.text(message, "what"), datagrams.number(message, "pid"))
            case "saving", _:
                for trainer in self.with_pid(datagrams.number(message, "pid")):
                    trainer.saving = message.get("on") is True
            case ("left" | "finished") as kind, _:
                self._ended(message, left=kind == "left")
        self._changed.set()
        return True

    async def until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until messages have made `condition` true; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    def _trainer(self, message: datagrams.Message) -> None:
        incarnation, socket = (
            datagrams.text(message, "incarnation"),
            datagrams.text(message, "socket"),
        )
        if not incarnation or not socket:
            return
        self.pythons += 1
        self._newest = incarnation
        self._incarnations.add(incarnation)
        self._drop_the_oldest()
        self._ranks.setdefault(incarnation, []).append(
            Trainer(
                pid=datagrams.number(message, "pid"),
                rank=datagrams.number(message, "rank"),
                world_size=max(1, datagrams.number(message, "world_size", 1)),
                incarnation=incarnation,
                restart_count=datagrams.number(message, "restart_count"),
                training=datagrams.number(message, "training"),
                socket=socket,
            )
        )

    def _unwatched(self, what: str, pid: int) -> None:
        if what in LINES:
            pids = self.unwatched.setdefault(what, set())
            if len(pids) < _MAX_UNWATCHED:
                pids.add(pid)

    def _drop_the_oldest(self) -> None:
        """A script may train thousands of times, one after the other."""
        while len(self._ranks) > KEPT:
            oldest = next(iter(self._ranks))
            if self.living(oldest):
                return
            self._steps_before += _steps(self._ranks.pop(oldest))

    def _ended(self, message: datagrams.Message, *, left: bool) -> None:
        pid, incarnation = datagrams.number(message, "pid"), datagrams.text(message, "incarnation")
        for trainer in self.with_pid(pid, incarnation):
            step = datagrams.number(message, "step", -1)
            trainer.last_step = max(trainer.last_step, step)
            if left:
                trainer.left_at = step
                trainer.early = trainer.early or message.get(BEFORE_UPDATE) is True
            else:
                trainer.finished = True


def _sound(message: datagrams.Message) -> bool:
    """Whether its numbers are some, and its incarnation one that can be in a record."""
    if not _INCARNATION.fullmatch(datagrams.text(message, "incarnation")):
        return False
    if "pid" in message and not 0 < datagrams.number(message, "pid") <= _MAX_PID:
        return False
    return all(-1 <= datagrams.number(message, name) < _MAX_NUMBER for name in _NUMBERS)


def _steps(ranks: list[Trainer]) -> int:
    """Steps of one training: the most of a rank."""
    return max((trainer.last_step + 1 for trainer in ranks), default=0)
