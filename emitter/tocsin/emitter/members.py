"""Who belongs to the job on this node, as its processes say by datagram."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tocsin.emitter import link


@dataclass(slots=True)
class Trainer:
    """A rank of a training on this node. `left_at` is the step at which it left when told to."""

    pid: int
    rank: int
    world_size: int
    incarnation: str
    restart_count: int
    training: int
    socket: str
    finished: bool = False
    left_at: int | None = None
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
        self.trainers: list[Trainer] = []
        self.agents: dict[int, Agent] = {}
        self._lives = lives
        self._changed = asyncio.Event()

    @property
    def incarnation(self) -> str:
        """That of the newest training of which a rank said hello, else the job's first."""
        return self.trainers[-1].incarnation if self.trainers else self.first

    @property
    def world_size(self) -> int:
        """That of the newest training."""
        return self.trainers[-1].world_size if self.trainers else 1

    def incarnations(self) -> frozenset[str]:
        """All of this job so far."""
        return frozenset({self.first, *(trainer.incarnation for trainer in self.trainers)})

    def living(self, incarnation: str) -> list[Trainer]:
        """Ranks of that training that are in it still."""
        return [
            trainer
            for trainer in self.trainers
            if trainer.incarnation == incarnation
            and not trainer.finished
            and self._lives(trainer.pid)
        ]

    def processes_live(self, incarnation: str) -> bool:
        """Whether a process that trained in that incarnation still runs."""
        return any(
            trainer.incarnation == incarnation and self._lives(trainer.pid)
            for trainer in self.trainers
        )

    def training_over(self) -> bool:
        """Whether there was a training and the newest one has ended."""
        return bool(self.trainers) and not self.living(self.incarnation)

    def unblocked(self) -> list[Agent]:
        """Agents that may still start workers again."""
        return [
            agent for agent in self.agents.values() if not agent.blocked and self._lives(agent.pid)
        ]

    def steps(self) -> int:
        """Steps that the ranks said they made, the most of a rank, over all trainings."""
        last: dict[str, int] = {}
        for trainer in self.trainers:
            known = last.get(trainer.incarnation, -1)
            last[trainer.incarnation] = max(known, trainer.last_step)
        return sum(step + 1 for step in last.values())

    def heard(self, message: link.Message) -> None:
        """Take one message; what is not understood is left aside."""
        match message["kind"], message.get("role"):
            case "hello", "trainer":
                self._trainer(message)
            case "hello", "agent":
                pid = link.number(message, "pid")
                self.agents[pid] = Agent(pid, link.text(message, "socket"))
                self.pythons += 1
            case "hello", _:
                self.pythons += 1
            case "restart_blocked", _:
                agent = self.agents.get(link.number(message, "pid"))
                if agent is not None:
                    agent.blocked = True
            case ("left" | "finished") as kind, _:
                self._ended(message, left=kind == "left")
        self._changed.set()

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

    def _trainer(self, message: link.Message) -> None:
        incarnation, socket = link.text(message, "incarnation"), link.text(message, "socket")
        if not incarnation or not socket:
            return
        self.pythons += 1
        self.trainers.append(
            Trainer(
                pid=link.number(message, "pid"),
                rank=link.number(message, "rank"),
                world_size=max(1, link.number(message, "world_size", 1)),
                incarnation=incarnation,
                restart_count=link.number(message, "restart_count"),
                training=link.number(message, "training"),
                socket=socket,
            )
        )

    def _ended(self, message: link.Message, *, left: bool) -> None:
        pid, incarnation = link.number(message, "pid"), link.text(message, "incarnation")
        for trainer in self.trainers:
            if trainer.pid != pid or (incarnation and trainer.incarnation != incarnation):
                continue
            step = link.number(message, "step", -1)
            trainer.last_step = max(trainer.last_step, step)
            if left:
                trainer.left_at = step
            else:
                trainer.finished = True
