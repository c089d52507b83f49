"""Runs whose records the driver sends itself: each once, twice, or in the wrong order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from support.chaos.model import FATAL
from support.records.poison_records import poisons
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.schemas.ids import incarnation_id, new_id
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.stops.commands import StopExited, StopRequested
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition

RUNS: Final = 4
LONGEST: Final = 80
"""Numbers of a run, after which another one begins: people are notified of 20 findings at most."""

NOW_MS: Final = 1_800_000_000_000


@dataclass
class _Run:
    name: str
    incarnation: str
    boot: str = field(default_factory=new_id)
    seq: int = 0
    step: int = 0


class PlainRuns:
    """Some runs at a time."""

    def __init__(self, topics: Topics, dice: random.Random) -> None:
        self._topics = topics
        self._dice = dice
        self._begun = 0
        self._runs: list[_Run] = []
        self.first: Outgoing | None = None
        """A good record."""

    def more(self, *, twice: bool = False, swapped: bool = False) -> list[Outgoing]:
        """The next records of each run, in the order in which they are to be sent."""
        sent: list[Outgoing] = []
        while len(self._runs) < RUNS:
            run = self._begin()
            self._runs.append(run)
            sent.append(self._started(run))
            self.first = self.first or sent[-1]
        for run in self._runs:
            own = [self._numbers(run, self._dice.randint(1, 3)) for _ in range(2)]
            if swapped:
                own.reverse()
            if twice:
                own = [each for one in own for each in (one, one)] + own
            sent += own
        self._runs = [run for run in self._runs if run.step < LONGEST]
        return sent

    def fatal(self) -> list[Outgoing]:
        """A run that has to be stopped: all that it says before it hears of that."""
        run = self._begin()
        sent = [self._started(run), self._numbers(run, 3)]
        return [*sent, self._frame(run, [float(FATAL)]), self._numbers(run, 2)]

    def poison(self) -> list[Outgoing]:
        """Each kind of what is no telemetry, among the records of a run that is there."""
        assert self.first is not None
        good = self.first
        record = Record(good.partition, 0, 0, good.key, good.value, good.headers)
        made = [Outgoing(good.partition, *kind) for kind in poisons(record)]
        self._dice.shuffle(made)
        return made

    def leaves(self, request: StopRequested) -> Outgoing:
        """What the launcher of a run says that has obeyed."""
        answer = StopExited(
            run_id=request.run_id,
            incarnation=request.incarnation,
            role="launcher",
            command_id=request.command_id,
            how="edge",
            exit_code=79,
        )
        return self._event(answer, request.run_id, f"launcher-{request.run_id}", 0)

    def _begin(self) -> _Run:
        self._begun += 1
        name = f"plain-{self._begun}"
        return _Run(name, incarnation_id(name, "job", 0, 0))

    def _started(self, run: _Run) -> Outgoing:
        started = RunStarted(run_id=run.name, incarnation=run.incarnation, job_id="job")
        return self._event(started, run.name, run.boot, self._next(run))

    def _numbers(self, run: _Run, count: int) -> Outgoing:
        return self._frame(run, [float(self._dice.randrange(FATAL)) for _ in range(count)])

    def _frame(self, run: _Run, numbers: list[float]) -> Outgoing:
        steps = range(run.step, run.step + len(numbers))
        run.step += len(numbers)
        frame = StepFrame(
            origin=RecordOrigin(run_id=run.name, incarnation=run.incarnation),
            steps=np.array(steps, np.uint64),
            at_us=np.full(len(numbers), NOW_MS * 1000, np.uint64),
            columns=("loss",),
            values=np.array([numbers], np.float32).T,
        )
        headers = meta_of(frame, boot=run.boot, seq=self._next(run)).headers()
        return Outgoing(self._place(run.name), run.name.encode(), frame.encode(), headers)

    def _event(self, data: Data, name: str, boot: str, seq: int) -> Outgoing:
        event = Event.wrap(data, id=f"{boot}/{seq}", source=f"/runs/{name}/ranks/0", time_ms=NOW_MS)
        headers = meta_of(event, boot=boot, seq=seq).headers()
        return Outgoing(self._place(name), name.encode(), event.encode(), headers)

    def _place(self, name: str) -> Partition:
        return Partition(self._topics.telemetry, telemetry_partition(name))

    @staticmethod
    def _next(run: _Run) -> int:
        run.seq += 1
        return run.seq - 1
