"""The rules behind a real worker on a real bus, which dies at each point of a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Outgoing, Partition, Record
from tocsin.runtime.testing import CRASH_POINTS, CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import RunView
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()
QUICK = WorkerSettings(checkpoint_s=0.02, poll_records=7)


class Died(Exception):
    """In the place of `kill -9`."""


def die() -> None:
    raise Died


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


def bad_run() -> RunBuilder:
    run = RunBuilder("gpt-1")
    run.started(role="launcher")
    run.started()
    run.steps(range(40), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    run.steps([40], loss=1.0, gradient_norm=math.nan, gradient_nonfinite=1)
    run.tensors(40, "gradients", ["a", "b"], nans={"b": 1})
    run.steps(range(41, 50), loss=math.nan, gradient_norm=math.nan, gradient_nonfinite=2)
    run.ended(outcome="stopped")
    run.ended(role="launcher", outcome="stopped")
    return run


async def send(bus: EmbeddedBus, run: RunBuilder) -> None:
    producer = await bus.producer()
    await producer.publish([Outgoing(r.partition, r.key, r.value, r.headers) for r in run.records])
    await producer.close()


async def read_all(bus: EmbeddedBus, topic: str, number: int) -> list[Record]:
    partition = Partition(topic, number)
    reader = await bus.reader({partition: EARLIEST})
    end = (await reader.ends([partition]))[partition]
    records: list[Record] = []
    while await reader.position(partition) < end:
        records += await reader.poll(timeout_s=1.0)
    await reader.close()
    return records


async def data_of(bus: EmbeddedBus, topic: str, number: int) -> list[Data]:
    found = []
    for record in await read_all(bus, topic, number):
        assert record.value is not None
        event = decode(read_meta(record.headers), record.value)
        assert isinstance(event, Event)
        found.append(event.data)
    return found


async def work(bus: EmbeddedBus, crash: CrashPoints) -> bool:
    """Whether it got to the end of what is there."""
    worker = Worker(
        bus,
        build_rules_service(TOPICS),
        topics=TOPICS,
        group="tocsin-rules-gpt-1",
        only_runs={"gpt-1"},
        settings=QUICK,
        crash=crash,
    )
    task = asyncio.create_task(worker.run())
    caught_up = asyncio.create_task(worker.caught_up(20))
    await asyncio.wait({task, caught_up}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        worker.stop()
    caught_up.cancel()
    with contextlib.suppress(Died):
        await task
        return True
    return False


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_a_worker_that_dies_repeats_issues_and_invents_none(
    bus: EmbeddedBus, point: str
) -> None:
    await send(bus, bad_run())
    died = 0
    for pass_number in (1, 2, 3, 2, 1):
        died += not await work(bus, CrashPoints(f"{point}:{pass_number}", die=die))
    assert died > 0
    assert await work(bus, CrashPoints(None))
    issues = await data_of(bus, TOPICS.issues, issue_partition("gpt-1"))
    firing = [one for one in issues if isinstance(one, IssueFiring)]
    assert len({one.issue_id for one in firing}) == 1
    assert {(one.rule, one.first_step, one.subject.name) for one in firing} == {
        ("nonfinite", 40, "b")
    }
    views = await data_of(bus, TOPICS.runs, telemetry_partition("gpt-1"))
    last = views[-1]
    assert isinstance(last, RunView)
    assert (last.state, last.outcome, last.issues, last.last_step) == ("ended", "stopped", 1, 49)
