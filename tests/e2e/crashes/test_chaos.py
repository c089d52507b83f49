"""Workers of one group are killed, frozen and started at random; an independent model checks.

The model knows the input and the arithmetic of the fold service, and nothing of tocsin but how a
record is read: which outputs must be there, by id, and which states. Four mutations of the worker
show that it finds what it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.processes.fold_member import RUNS
from support.processes.forking import AlwaysForked
from support.records.on_bus import read_all
from support.rules.fold_service import EVERY, MODULUS
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import BusUnavailable, Outgoing, Partition
from tocsin.runtime.testing import CRASH_AT
from tocsin.schemas.topics import Topics, telemetry_partition

TOPICS = Topics()
TESTS = Path(__file__).parents[2]


class Model:
    """What must be on the bus, from the input alone."""

    def __init__(self) -> None:
        self.input: dict[str, list[int]] = {run: [] for run in RUNS}

    def outputs(self) -> dict[str, int]:
        """The state in each output, by its id."""
        found: dict[str, int] = {}
        for run, numbers in self.input.items():
            state = 1
            for count, number in enumerate(numbers, 1):
                state = (state * 31 + number + 1) % MODULUS
                if count % EVERY == 0:
                    found[f"{run}/{count}"] = state
        return found

    def states(self) -> dict[str, tuple[int, int]]:
        """Of each run the state, and how many numbers are in it."""
        found = {}
        for run, numbers in self.input.items():
            state = 1
            for number in numbers:
                state = (state * 31 + number + 1) % MODULUS
            found[run] = state, len(numbers)
        return found

    async def faults(self, bus: EmbeddedBus) -> list[str]:
        """In sentences, how the bus differs."""
        faults: list[str] = []
        seen: dict[str, set[int]] = {}
        for number in range(12):
            for record in await read_all(bus, TOPICS.issues, number):
                told = json.loads(record.value or b"")
                seen.setdefault(told["id"], set()).add(told["state"])
        expected = self.outputs()
        faults += [f"lost: {name}" for name in expected.keys() - seen.keys()]
        faults += [f"invented: {name}" for name in seen.keys() - expected.keys()]
        faults += [
            f"wrong: {name}" for name, found in seen.items() if found != {expected.get(name)}
        ]
        for run, state in self.states().items():
            newest: dict[str, int] = {"next_offset": -1, "state": 1, "count": 0}
            for record in await read_all(bus, TOPICS.state, telemetry_partition(run)):
                if record.key == f"{run}/fold".encode():
                    saved = json.loads(record.value or b"")
                    newest = saved if saved["next_offset"] >= newest["next_offset"] else newest
            if (newest["state"], newest["count"]) != state:
                faults.append(f"wrong state: {run}")
        return faults


def process(
    path: Path, mutation: str = "none", end: str = "never", crash_at: str | None = None
) -> AlwaysForked:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop(CRASH_AT, None)
    if crash_at is not None:
        environment[CRASH_AT] = crash_at
    words = [sys.executable, "-m", "support.processes.fold_member", str(path), mutation, end]
    return AlwaysForked(words, env=environment)


async def ended(child: AlwaysForked) -> int:
    return await asyncio.to_thread(child.wait, 120)


async def send(
    bus: EmbeddedBus,
    model: Model,
    dice: random.Random,
    rounds: int,
    frozen: Sequence[AlwaysForked] = (),
) -> None:
    """The next number of each run, so many times."""
    producer = await bus.producer()
    for _ in range(rounds):
        records = []
        for run in RUNS:
            number = dice.randrange(100)
            model.input[run].append(number)
            place = Partition(TOPICS.telemetry, telemetry_partition(run))
            records.append(Outgoing(place, run.encode(), b"%d" % number))
        try:
            await producer.publish(records)
        except BusUnavailable:
            # One was frozen in the middle of a write, and keeps the file locked until it goes on.
            for one in frozen:
                os.kill(one.pid, signal.SIGCONT)
            await producer.publish(records)
    await producer.close()


def used_s(pid: int) -> float:
    """Processor seconds of a process; -1 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def has_worked(pid: int, seconds: float) -> None:
    """Until a process has used so much of the processor, is gone, or has nothing more to do."""
    start_s = used_s(pid)
    # One that has read all waits for input, which the next turn brings.
    with contextlib.suppress(AssertionError):
        await until(lambda: not 0 <= used_s(pid) < start_s + seconds, timeout_s=3.0)


async def chaos(path: Path, seed: int, kills: int, *, freezes: int) -> tuple[int, list[str]]:
    """Kills and freezes workers at random while input comes; how many were killed, and the faults
    that the model finds at the end."""
    dice, model, killed = random.Random(seed), Model(), 0
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        workers = [process(path) for _ in range(2)]
        try:
            frozen: list[AlwaysForked] = []
            while killed < kills:
                await send(bus, model, dice, dice.randint(1, 6), frozen)
                number = dice.randrange(len(workers))
                victim = workers[number]
                await has_worked(victim.pid, dice.choice((0.01, 0.03, 0.06, 0.12)))
                if len(frozen) < freezes and dice.random() < 0.2:
                    # It wakes up as a zombie: another has its partitions by then, or not yet.
                    os.kill(victim.pid, signal.SIGSTOP)
                    frozen.append(victim)
                else:
                    victim.kill()
                    await ended(victim)
                    killed += 1
                workers[number] = process(path)
                if frozen and dice.random() < 0.3:
                    os.kill(frozen[0].pid, signal.SIGCONT)
                    workers.append(frozen.pop(0))
                while len(workers) > 3:
                    oldest = workers.pop(0)
                    oldest.kill()
                    await ended(oldest)
            for one in frozen:
                os.kill(one.pid, signal.SIGCONT)
            workers += frozen
            await send(bus, model, dice, 3)
            await has_worked(workers[-1].pid, 0.05)
        finally:
            for one in workers:
                one.kill()
                await ended(one)
        assert await ended(process(path, end="caught-up")) == 0
        return killed, await model.faults(bus)


async def test_workers_are_killed_frozen_and_started_at_random(tmp_path: Path) -> None:
    killed, faults = await chaos(tmp_path / "bus.db", 20261125, 6, freezes=2)
    assert faults == []
    assert killed == 6


@pytest.mark.torture
@pytest.mark.parametrize("number", range(int(os.environ.get("TOCSIN_KILLS", "2000")) // 100))
async def test_chaos_for_long(tmp_path: Path, number: int) -> None:
    seed = int(os.environ.get("TOCSIN_KILL_SEED", "20261125")) + number
    killed, faults = await chaos(tmp_path / "bus.db", seed, 100, freezes=10)
    assert (killed, faults) == (100, [])


@pytest.mark.parametrize(
    ("mutation", "point"),
    [
        ("no-guard", "snapshots_acknowledged:3"),
        ("commits-first", "outputs_acknowledged:3"),
        ("unacknowledged", "committed:5"),
        ("states-unacknowledged", "committed:5"),
    ],
)
async def test_the_suite_finds_each_mutation_of_the_worker(
    tmp_path: Path, mutation: str, point: str
) -> None:
    path, model, dice = tmp_path / "bus.db", Model(), random.Random(1)
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        await send(bus, model, dice, 40)
        dead = process(path, mutation, "caught-up", crash_at=point)
        assert await ended(dead) == 137
        assert (
            await ended(process(path, mutation if mutation == "no-guard" else "none", "caught-up"))
            == 0
        )
        assert await model.faults(bus), "a suite that finds nothing here finds nothing at all"


async def test_the_same_crashes_without_a_mutation_are_no_fault(tmp_path: Path) -> None:
    path, model, dice = tmp_path / "bus.db", Model(), random.Random(1)
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        await send(bus, model, dice, 40)
        for point in ("snapshots_acknowledged:3", "outputs_acknowledged:3", "committed:5"):
            assert await ended(process(path, "none", "caught-up", crash_at=point)) == 137
        assert await ended(process(path, end="caught-up")) == 0
        assert await model.faults(bus) == []
