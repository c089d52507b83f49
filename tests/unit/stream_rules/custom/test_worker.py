"""Custom rules behind a real worker on a real bus: it dies, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.records.on_bus import data_of, die, read_all, send, work
from support.rules.custom import FILE, QUICK
from support.waiting import SOON_S
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Partition, Record
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()
OFTEN = WorkerSettings(checkpoint_s=0.02, poll_records=7)
RULES = f"""\
version: 1
rules:
  - {{name: mine, use: "{FILE}:HighLoss", params: {{limit: 2.5}}}}
  - {{name: bad, use: "{FILE}:Sick", params: {{how: HOW, at: 30}}}}
"""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


def config(how: str) -> Config:
    made, problems = check_config(RULES.replace("HOW", how), "test")
    assert made is not None, problems
    return made


def a_run() -> RunBuilder:
    run = RunBuilder("gpt-1")
    run.started(role="launcher")
    run.started()
    run.steps(range(40), loss=1.0)
    run.steps([40], loss=5.0)
    run.steps(range(41, 45), loss=1.0)
    run.steps([45], loss=6.0)
    run.steps([46], loss=1.0)
    return run


def the_end(run: RunBuilder) -> list[Record]:
    before = len(run.records)
    run.steps([47], loss=math.nan)
    run.ended()
    run.ended(role="launcher")
    return run.records[before:]


def worker_of(bus: EmbeddedBus, how: str, crash: CrashPoints, limits: Limits = QUICK) -> Worker:
    return Worker(
        bus,
        build_rules_service(TOPICS, config(how), limits=limits),
        topics=TOPICS,
        group="tocsin-rules-gpt-1",
        only_runs={"gpt-1"},
        settings=OFTEN,
        crash=crash,
    )


async def issues(bus: EmbeddedBus) -> list[IssueFiring]:
    found = await data_of(bus, TOPICS.issues, issue_partition("gpt-1"))
    return [issue for issue in found if isinstance(issue, IssueFiring)]


async def found_by(bus: EmbeddedBus, rule: str) -> None:
    """Read issues until there is one of that rule."""
    reader = await bus.reader({Partition(TOPICS.issues, issue_partition("gpt-1")): EARLIEST})
    found = False
    while not found:
        for record in await reader.poll(timeout_s=1.0):
            event = decode(read_meta(record.headers), record.value or b"")
            assert isinstance(event, Event)
            found |= isinstance(event.data, IssueFiring) and event.data.rule == rule
    await reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [pytest.param("applied", marks=pytest.mark.torture), "snapshots_acknowledged"],
)
async def test_a_worker_that_dies_repeats_issues_and_invents_none(
    bus: EmbeddedBus, point: str
) -> None:
    run = a_run()
    await send(bus, run.records)
    done = await work(worker_of(bus, "exit", CrashPoints(f"{point}:4", die=die)))
    await send(bus, the_end(run))
    while not await work(worker_of(bus, "exit", CrashPoints(None))):
        pass

    assert not done
    told = await issues(bus)
    firing = {(issue.issue_id, issue.times): issue for issue in told if issue.state == "firing"}
    mine = [issue for issue in firing.values() if issue.rule == "mine"]
    assert [issue.reason for issue in mine] == [
        "loss 5 at step 40, the 41th",
        "loss 6 at step 45, the 46th (time 2 in this run)",
    ]
    assert len({issue.issue_id for issue in mine}) == 1
    assert len([issue for issue in firing.values() if issue.rule == "rule_failed"]) == 1
    views = await data_of(bus, TOPICS.runs, telemetry_partition("gpt-1"))
    assert isinstance(views[-1], RunView)
    assert views[-1].state == "ended"
    assert (views[-1].rules["mine"], views[-1].rules["bad"]) == ("issues_found", "error")


async def test_states_never_cover_more_than_was_told(bus: EmbeddedBus) -> None:
    run = a_run()
    await send(bus, [*run.records, *the_end(run)])
    assert await work(worker_of(bus, "well", CrashPoints(None)))

    number = telemetry_partition("gpt-1")
    saved = [Snapshot.decode(r.value) for r in await read_all(bus, TOPICS.state, number) if r.value]
    last = {snapshot.rule: snapshot.next_offset for snapshot in saved}
    assert last["mine"] == last["bad"] == last["_custom"] == len(run.records)


async def test_a_built_in_issue_is_on_the_bus_while_a_custom_rule_loops(
    bus: EmbeddedBus,
) -> None:
    run = a_run()
    patient = Limits(call_s=10 * SOON_S, call_cpu_s=10 * SOON_S)
    worker = worker_of(bus, "loop", CrashPoints(None), limits=patient)
    task = asyncio.create_task(worker.run())
    await send(bus, run.records)
    try:
        async with asyncio.timeout(SOON_S):
            await worker.ready.wait()
            await send(bus, the_end(run))
            await found_by(bus, "nonfinite")
    finally:
        worker.stop()
        await task
