"""The worker as a process that dies at each point between poll and commit, on a real bus file."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.processes.forking import Forked
from support.records.on_bus import read_all
from support.rules.fold_service import expected_outputs, fold
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition
from tocsin.runtime.testing import CRASH_AT, CRASH_POINTS
from tocsin.schemas.topics import Topics, telemetry_partition

TOPICS = Topics()
TESTS = Path(__file__).parents[2]
NUMBERS = {"run-1": [7 * i % 97 for i in range(60)], "run-2": [i * i % 89 for i in range(60)]}


async def process(path: Path, *, guard: bool = True, crash_at: str | None = None) -> int:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop(CRASH_AT, None)
    if crash_at is not None:
        environment[CRASH_AT] = crash_at
    words = (str(path), "guard" if guard else "none")
    child = Forked([sys.executable, "-m", "support.processes.fold", *words], env=environment)
    return await asyncio.to_thread(child.wait, 60)


async def outputs(bus: EmbeddedBus, run: str) -> list[tuple[str, int]]:
    found = await read_all(bus, TOPICS.issues, telemetry_partition(run) % 12)
    rows = [json.loads(record.value or b"") for record in found if record.key == run.encode()]
    return [(row["id"], row["state"]) for row in rows]


async def states(bus: EmbeddedBus) -> Mapping[str, int]:
    last = {}
    for run in NUMBERS:
        for record in await read_all(bus, TOPICS.state, telemetry_partition(run)):
            if record.key == f"{run}/fold".encode():
                last[run] = json.loads(record.value or b"")["state"]
    return last


async def fill(bus: EmbeddedBus) -> None:
    await bus.init(TOPICS.specs())
    producer = await bus.producer()
    for pair in zip(*([(run, n) for n in row] for run, row in NUMBERS.items()), strict=True):
        await producer.publish(
            [
                Outgoing(
                    Partition(TOPICS.telemetry, telemetry_partition(run)),
                    run.encode(),
                    b"%d" % number,
                )
                for run, number in pair
            ]
        )


def expected_states() -> dict[str, int]:
    result = {}
    for run, row in NUMBERS.items():
        state = 1
        for number in row:
            state = fold(state, number)
        result[run] = state
    return result


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_a_crash_at_any_point_repeats_and_never_invents(tmp_path: Path, point: str) -> None:
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as bus:
        await fill(bus)

        assert await process(path, crash_at=f"{point}:3") == 137
        assert await process(path) == 0

        for run, row in NUMBERS.items():
            found = await outputs(bus, run)
            assert dict(found) == expected_outputs(run, row)
            assert set(found) == set(expected_outputs(run, row).items())
        assert await states(bus) == expected_states()


async def test_the_check_finds_a_snapshot_without_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as bus:
        await fill(bus)

        assert await process(path, guard=False, crash_at="snapshots_acknowledged:3") == 137
        assert await process(path, guard=False) == 0

        assert await states(bus) != expected_states()


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(20))
async def test_random_crashes(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "bus.db"
    dice = random.Random(seed)
    async with EmbeddedBus(path) as bus:
        await fill(bus)

        deaths = 0
        for _ in range(8):
            crash_at = f"{dice.choice(CRASH_POINTS)}:{dice.randint(1, 8)}"
            deaths += await process(path, crash_at=crash_at) == 137
        assert await process(path) == 0

        assert deaths >= 2
        for run, row in NUMBERS.items():
            assert dict(await outputs(bus, run)) == expected_outputs(run, row)
        assert await states(bus) == expected_states()
