"""Failures of what is around the rules: the log is gone, the states are gone, records are poison.

The table in docs/explanation/reliability.md names the test of each kind of failure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from support.buses import until
from support.records.on_bus import data_of, read_all, send, work
from support.records.poison_records import poisons
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing
from tocsin.runtime.dead_letters import DeadLetterLimits, TooManyDeadLetters
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import DLQ_PARTITIONS, Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()
RUN = "gpt-1"
DAY_MS = 86_400_000


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


def a_worker(bus: EmbeddedBus, limits: DeadLetterLimits | None = None) -> Worker:
    settings = WorkerSettings(checkpoint_s=0.02, dead_letters=limits or DeadLetterLimits())
    service = build_rules_service(TOPICS)
    return Worker(bus, service, topics=TOPICS, group="tocsin-rules", settings=settings)


async def issues_on(bus: EmbeddedBus) -> dict[str, IssueFiring]:
    found = await data_of(bus, TOPICS.issues, issue_partition(RUN))
    return {one.rule: one for one in found if isinstance(one, IssueFiring)}


def going(steps: int) -> RunBuilder:
    run = RunBuilder(RUN)
    run.started(role="launcher")
    run.started()
    run.steps(range(steps), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    return run


async def test_a_worker_that_was_away_for_longer_than_records_are_kept_reports_the_gap(
    bus: EmbeddedBus,
) -> None:
    run = going(20)
    await send(bus, run.records)
    assert await work(a_worker(bus))
    at = len(run.records)
    for step in range(20, 60):
        run.steps([step], loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    await send(bus, run.records[at : at + 30])
    number = telemetry_partition(RUN)
    newest = (await read_all(bus, TOPICS.telemetry, number))[-1].append_ms
    await bus.maintain(1_000, newest + DAY_MS + 1)
    assert await read_all(bus, TOPICS.telemetry, number) == []
    run.heartbeat()
    await send(bus, run.records[at + 30 :])

    assert await work(a_worker(bus))

    found = await issues_on(bus)
    assert "telemetry_gap" in found
    assert "30" in found["telemetry_gap"].reason
    assert not {"stalled_training", "telemetry_lost"} & found.keys(), (
        "nothing is made of the silence"
    )


async def test_a_run_that_stalls_after_such_a_gap_is_found(bus: EmbeddedBus) -> None:
    entry = RuleEntry(name="stalls", use="stalled_training", params={"threshold": "2s"})
    config = Config(rules=(entry,))

    def worker() -> Worker:
        service = build_rules_service(TOPICS, config)
        return Worker(bus, service, topics=TOPICS, group="tocsin-rules")

    run = going(20)
    await send(bus, run.records)
    assert await work(worker())
    at = len(run.records)
    run.steps(range(20, 50), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    await send(bus, run.records[at:])
    newest = (await read_all(bus, TOPICS.telemetry, telemetry_partition(RUN)))[-1].append_ms
    await bus.maintain(1_000, newest + DAY_MS + 1)

    task = asyncio.create_task((after := worker()).run())

    async def stalled() -> bool:
        at = len(run.records)
        run.heartbeat(last_step=49)
        await send(bus, run.records[at:])
        await asyncio.sleep(0.3)
        return "stalls" in await issues_on(bus)

    await until(stalled, "the stall is found")
    after.stop()
    await task
    assert (await issues_on(bus))["stalls"].state == "firing"


async def test_a_worker_whose_states_are_lost_starts_cold_and_says_so(bus: EmbeddedBus) -> None:
    run = going(30)
    await send(bus, run.records)
    assert await work(a_worker(bus))
    number = telemetry_partition(RUN)
    states = await read_all(bus, TOPICS.state, number)
    producer = await bus.producer()
    gone = [Outgoing(record.partition, record.key, None) for record in states]
    await producer.publish(gone)
    await producer.close()

    at = len(run.records)
    run.steps(range(30, 35), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    await send(bus, run.records[at:])
    assert await work(a_worker(bus))

    assert (await issues_on(bus))["cold_start"].severity == "info"


async def test_each_kind_of_poison_is_set_aside_and_the_run_goes_on(bus: EmbeddedBus) -> None:
    run = going(5)
    good = run.records[1]
    made = [Outgoing(good.partition, key, value, headers) for key, value, headers in poisons(good)]
    assert len(made) >= 20
    await send(bus, run.records)
    producer = await bus.producer()
    await producer.publish(made)
    await producer.close()
    at = len(run.records)
    run.steps([5], loss=float("nan"), gradient_norm=1.0, gradient_nonfinite=0)
    await send(bus, run.records[at:])

    assert await work(a_worker(bus))

    letters = [
        letter
        for number in range(DLQ_PARTITIONS)
        for letter in await read_all(bus, TOPICS.dlq, number)
    ]
    buried = Counter((one.key, one.value or b"") for one in letters)
    sent = Counter((one.key, one.value or b"") for one in made)
    assert buried == sent, "each of them, untouched"
    assert "nonfinite" in await issues_on(bus)


async def test_a_flood_of_poison_stops_the_worker_before_the_topic_is_empty(
    bus: EmbeddedBus,
) -> None:
    good = going(1).records[0]
    flood: Sequence[Outgoing] = [
        Outgoing(good.partition, good.key, b"%d" % n, good.headers) for n in range(400)
    ]
    producer = await bus.producer()
    await producer.publish(flood)
    await producer.close()
    with pytest.raises(TooManyDeadLetters, match="in a row cannot be read"):
        await a_worker(bus, DeadLetterLimits(consecutive=50)).run()
    letters = [
        letter
        for number in range(DLQ_PARTITIONS)
        for letter in await read_all(bus, TOPICS.dlq, number)
    ]
    assert len(letters) < 400
