"""Clocks jump while a worker runs, and machines sleep: no silence is made of it, and none hidden.

Time is virtual. Each process has the clock that it would have on a machine whose time goes on as
the test says: `monotonic_clock` itself, as it is imported there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.records.on_bus import data_of, send
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas import monotonic_clock
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import RunBuilder, only

TOPICS = Topics()
RUN = "gpt-1"
HOUR_S = 3_600
STALLS = only("stalled_training")
BOTH = (*STALLS, *only("telemetry_lost"))
NowMs = Callable[[], int]


class Machine:
    """In the place of the module `time`, as far as a process reads it when it begins."""

    def __init__(self) -> None:
        self._wall_ns = 1_800_000_000 * 10**9
        self._monotonic_ns = 5_000 * 10**9

    def time_ns(self) -> int:
        return self._wall_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def passes(self, seconds: int) -> None:
        self._wall_ns += seconds * 10**9
        self._monotonic_ns += seconds * 10**9

    def sleeps(self, seconds: int) -> None:
        """It is suspended, or its clock is set: what is monotonic stands still."""
        self._wall_ns += seconds * 10**9

    def process(self) -> NowMs:
        """The clock of a process that begins now."""
        spec = importlib.util.spec_from_file_location("its_clock", str(monotonic_clock.__file__))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "time", self)
            spec.loader.exec_module(module)
        now_ms: NowMs = module.unix_ms
        return now_ms


@dataclass
class WorkersClock:
    """That of a process, and by how much it is wrong."""

    process_ms: NowMs
    ahead_ms: int = 0

    def now_ms(self) -> int:
        """See `tocsin.runtime.clock`."""
        return self.process_ms() + self.ahead_ms


@dataclass
class Watched:
    """A run on the bus in the file `path`, and the worker that reads along.

    `process_ms` is the clock of who sends, and so of the bus.
    """

    path: Path
    bus: EmbeddedBus
    machine: Machine
    process_ms: NowMs
    worker: Worker
    clock: WorkersClock
    run: RunBuilder = field(default_factory=lambda: RunBuilder(RUN, step_ms=10_000))
    step: int = 0

    async def goes_on(self, seconds: int, *, steps: bool = True, heartbeats: bool = True) -> None:
        """For so long, ten seconds at a time."""
        for _ in range(0, seconds, 10):
            self.machine.passes(10)
            before = len(self.run.records)
            if steps:
                self.run.steps([self.step], loss=1.0, step_time_s=10.0)
                self.step += 1
            if heartbeats:
                self.run.heartbeat()
            await send(self.bus, self.run.records[before:])
            # The first round asks for the ends, and only the next one is sure that it has all.
            for _ in range(2):
                self.worker.nudge()
                assert await self.worker.caught_up(10)

    async def found(self) -> list[tuple[str, str]]:
        """Rules and states of the issues, in their order."""
        told = await data_of(self.bus, TOPICS.issues, issue_partition(RUN))
        return [(one.rule, one.state) for one in told if isinstance(one, IssueFiring)]

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.worker.run())
        try:
            yield
        finally:
            self.worker.stop()
            await task


def worker_on(bus: EmbeddedBus, clock: WorkersClock, specs: Sequence[RuleSpec] = BOTH) -> Worker:
    service, settings = RulesService(TOPICS, specs), WorkerSettings(checkpoint_s=0.02)
    return Worker(bus, service, topics=TOPICS, group="rules", clock=clock, settings=settings)


@asynccontextmanager
async def watched(folder: Path, specs: Sequence[RuleSpec] = BOTH) -> AsyncIterator[Watched]:
    """A run that has made steps for some minutes."""
    machine = Machine()
    process_ms = machine.process()
    clock = WorkersClock(process_ms)
    path = folder / "bus.db"
    async with EmbeddedBus(path, clock=process_ms) as bus:
        await bus.init(TOPICS.specs())
        one = Watched(path, bus, machine, process_ms, worker_on(bus, clock, specs), clock)
        one.run.started()
        await send(bus, one.run.records)
        async with one.working():
            await one.goes_on(100)
            yield one


async def stalls_then_ends(one: Watched) -> None:
    """The training hangs for a while, makes steps again, and is then heard no more."""
    await one.goes_on(320, steps=False)
    assert await one.found() == [("stalled_training", "firing")]
    await one.goes_on(20)
    await one.goes_on(80, steps=False, heartbeats=False)
    _, *then = await one.found()
    assert then == [("stalled_training", "resolved"), ("telemetry_lost", "firing")]


@pytest.mark.parametrize("hours", [8, -8])
async def test_a_run_that_goes_on_when_its_machine_wakes_up_is_not_lost(
    tmp_path: Path, hours: int
) -> None:
    async with watched(tmp_path) as one:
        one.machine.sleeps(hours * HOUR_S)
        await one.goes_on(100)
        assert await one.found() == []
        await stalls_then_ends(one)


@pytest.mark.parametrize("ahead_ms", [HOUR_S * 1000, -HOUR_S * 1000])
async def test_a_running_workers_clock_jumps_and_no_stall_is_made_of_it(
    tmp_path: Path, ahead_ms: int
) -> None:
    async with watched(tmp_path, STALLS) as one:
        one.clock.ahead_ms = ahead_ms
        await one.goes_on(400)
        assert await one.found() == []


async def test_a_running_workers_clock_falls_behind_and_a_stall_is_found_all_the_same(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, STALLS) as one:
        one.clock.ahead_ms = -HOUR_S * 1000
        await one.goes_on(20)
        await one.goes_on(320, steps=False)
        assert await one.found() == [("stalled_training", "firing")]
        await one.goes_on(20)
        assert await one.found() == [
            ("stalled_training", "firing"),
            ("stalled_training", "resolved"),
        ]


async def idle_rounds(one: Watched) -> None:
    """Some rounds of the worker before anything comes."""
    await one.worker.ready.wait()
    for _ in range(3):
        one.worker.nudge()
        assert await one.worker.caught_up(10)


async def test_a_run_is_not_lost_for_a_worker_that_was_started_since_it_woke_up(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as one:
        one.machine.sleeps(8 * HOUR_S)
    one.clock = WorkersClock(one.machine.process())
    async with (
        EmbeddedBus(one.path, clock=one.process_ms) as one.bus,
        EmbeddedBus(one.path, clock=one.clock.process_ms) as own,
    ):
        one.worker = worker_on(own, one.clock)
        async with one.working():
            await idle_rounds(one)
            await one.goes_on(100)
            assert await one.found() == []
            await stalls_then_ends(one)


async def test_nor_for_one_whose_clock_is_two_minutes_ahead_of_the_bus(tmp_path: Path) -> None:
    async with watched(tmp_path) as one:
        pass
    async with EmbeddedBus(one.path, clock=one.process_ms) as one.bus:
        one.clock = WorkersClock(one.process_ms, ahead_ms=120_000)
        one.worker = worker_on(one.bus, one.clock)
        async with one.working():
            await idle_rounds(one)
            await one.goes_on(100)
            assert await one.found() == []


async def test_a_silence_is_found_in_time_by_a_worker_whose_clock_is_an_hour_behind(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as one:
        pass
    async with EmbeddedBus(one.path, clock=one.process_ms) as one.bus:
        one.clock = WorkersClock(one.process_ms, ahead_ms=-HOUR_S * 1000)
        one.worker = worker_on(one.bus, one.clock)
        async with one.working():
            await one.goes_on(100)
            await one.goes_on(150, steps=False, heartbeats=False)
            assert await one.found() == [("telemetry_lost", "firing")]
