"""A worker takes over from another one, on a bus of either kind, and what it has read before."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.buses import World, until
from support.configured_buses import context_on
from support.records.on_bus import read_all
from support.rules.fold_service import FoldService, expected_outputs
from support.waiting import until as soon
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import LATEST, Bus, From, Outgoing, Partition
from tocsin.console.__main__ import app
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.standby import Standby
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import TELEMETRY_PARTITIONS, Topics, telemetry_partition

RUNS = [f"run-{number}" for number in range(12)]
DAY_MS = 86_400_000


@asynccontextmanager
async def running(
    bus: Bus, topics: Topics, metrics: PrometheusMetrics, *, standby_bytes: int = 0
) -> AsyncIterator[tuple[Worker, FoldService, asyncio.Task[None]]]:
    service = FoldService(topics)
    settings = WorkerSettings(checkpoint_s=0.02, standby_bytes=standby_bytes)
    worker = Worker(
        bus,
        service,
        topics=topics,
        group=f"{topics.prefix}-fold",
        metrics=metrics,
        settings=settings,
    )
    task = asyncio.create_task(worker.run())
    try:
        yield worker, service, task
    finally:
        worker.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def send(bus: Bus, topics: Topics, numbers: Sequence[int]) -> None:
    producer = await bus.producer()
    for number in numbers:
        places = [Partition(topics.telemetry, telemetry_partition(run)) for run in RUNS]
        rows = zip(places, RUNS, strict=True)
        await producer.publish([Outgoing(p, run.encode(), b"%d" % number) for p, run in rows])
    await producer.close()


async def has_read_all(bus: Bus, standby: Standby) -> bool:
    starts = standby._kept.starts()
    if not starts:
        return False
    reader = await bus.reader(starts)
    ends = await reader.ends(list(starts))
    await reader.close()
    return all(end == 0 or starts[p] == From.offset(end) for p, end in ends.items())


async def states(bus: Bus, topics: Topics, numbers: Collection[int]) -> int:
    return sum([len(await read_all(bus, topics.state, number)) for number in numbers])


async def test_a_worker_that_stands_by_reads_only_the_tail_when_another_ends(
    world: World, bus: Bus
) -> None:
    topics, metrics = Topics(world.prefix), PrometheusMetrics()
    await bus.init(topics.specs())

    def read() -> float:
        return metrics.value(names.RESTORE_RECORDS, service="fold")

    async with running(bus, topics, PrometheusMetrics()) as (first, _, killed):
        for number in range(8):
            await send(bus, topics, [number])
            assert await first.caught_up(60)
        async with running(bus, topics, metrics, standby_bytes=1 << 24) as (second, two, _):
            await soon(lambda: len(two.partitions) == TELEMETRY_PARTITIONS // 2)
            standby = second._wiring._standby
            assert standby is not None
            await until(lambda: has_read_all(bus, standby), "the standby has read all")
            theirs = {telemetry_partition(run) for run in RUNS} - two.partitions.keys()
            assert theirs
            # From here on it reads no more, so the tail is known.
            await standby.close()
            before, known = read(), await states(bus, topics, theirs)
            await send(bus, topics, [8])
            assert await first.caught_up(60)
            assert await second.caught_up(60)
            tail = await states(bus, topics, theirs) - known
            assert len(theirs) <= tail < known

            killed.cancel()
            await soon(lambda: len(two.partitions) == TELEMETRY_PARTITIONS)
            await soon(lambda: read() > before)
            assert read() - before == tail
            await send(bus, topics, range(9, 20))
            assert await second.caught_up(60)

    for run in RUNS:
        found = await read_all(bus, topics.issues, telemetry_partition(run) % 12)
        rows = [json.loads(one.value or b"") for one in found if one.key == run.encode()]
        assert {row["id"]: row["state"] for row in rows} == expected_outputs(run, range(20))


class Made(Exception):
    """In the place of a worker that works."""


@pytest.mark.parametrize(("options", "mib"), [((), 256), (("--standby", "3"), 3)])
def test_rules_workers_stand_by_on_kafka(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    mib: int,
) -> None:
    context_on(world, tmp_path, "defaults: {rules: none}\n")
    made: list[int] = []

    def note(*_: object, settings: WorkerSettings, **__: object) -> None:
        made.append(settings.standby_bytes)
        raise Made

    monkeypatch.setattr("tocsin.console.services.workers.Worker", note)
    words = ["rules", "--config", str(tmp_path / "tocsin.yaml"), *options]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, Made), done.output
    assert made == [mib * 1024 * 1024 if world.kind == "kafka" else 0]


async def test_what_retention_has_removed_up_to_the_end_counts_as_read(
    world: World, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.runtime.bus_clock.SETTLING_MS", 1_000)
    topics = Topics(world.prefix)
    await bus.init(topics.specs())
    await send(bus, topics, range(5))
    numbers = {telemetry_partition(run) for run in RUNS}
    if isinstance(bus, EmbeddedBus):
        newest = (await read_all(bus, topics.telemetry, min(numbers)))[-1].append_ms
        await bus.maintain(1_000, newest + DAY_MS + 60_000)
    else:
        places = [Partition(topics.telemetry, number) for number in numbers]
        reader = await bus.reader(dict.fromkeys(places, LATEST))
        for place, end in (await reader.ends(places)).items():
            await world.expire(bus, place, end)
        await reader.close()

    async with running(bus, topics, PrometheusMetrics()) as (worker, service, _):
        assert await worker.caught_up(60)
        assert service.applied == 0
        service.due_ms = 1
        worker.nudge()
        await soon(lambda: any(numbers <= tick.caught_up.keys() for tick in service.ticks))
        await send(bus, topics, [5])
        assert await worker.caught_up(60)
        assert service.applied == len(RUNS)
