"""Action workers on each bus: they share the work, one takes over; what failed is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.at_work import at_work
from support.buses import World
from support.processes.forking import Forked
from support.records.issues import issue, issue_record
from support.servers.fault_server import fault_server
from support.waiting import until
from tocsin.actions.composition import build_actions_service
from tocsin.actions.decision.retry import RetryPolicy
from tocsin.bus.port import Bus, Outgoing, Partition
from tocsin.console.dead_letters.letters import choose_letter, state_of
from tocsin.console.dead_letters.redrive import Contents, Redriven, as_text, read_contents, redrive
from tocsin.console.views.bus_view import read_all
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import ISSUE_PARTITIONS, Topics, issue_partition

TESTS = Path(__file__).parents[1]


@pytest.fixture
async def topics(world: World, bus: Bus) -> Topics:
    topics = Topics(world.prefix)
    await bus.init(topics.specs())
    return topics


@asynccontextmanager
async def worker(bus: Bus, topics: Topics, url: str) -> AsyncIterator[PrometheusMetrics]:
    """A member of the group that delivers there."""
    metrics = PrometheusMetrics()
    service = build_actions_service(
        topics,
        Config(),
        bus=bus,
        key=SigningKey.generate(),
        secrets={},
        embedded=True,
        notify=[url],
        policy=RetryPolicy(first_ms=10, most_ms=20, least_ms=5),
        metrics=metrics,
    )
    running = Worker(
        bus,
        service,
        topics=topics,
        group=f"{topics.prefix}-actions",
        metrics=metrics,
        settings=WorkerSettings(checkpoint_s=0.05),
    )
    async with at_work(running):
        yield metrics


async def send(bus: Bus, topics: Topics, *issues: IssueFiring) -> None:
    producer = await bus.producer()
    for one in issues:
        partition = Partition(topics.issues, issue_partition(one.run_id))
        await producer.publish([replace(issue_record(one), partition=partition)])
    await producer.close()


async def finals(bus: Bus, topics: Topics) -> Counter[str]:
    """How many final states each delivery has had, by id."""
    found: Counter[str] = Counter()
    parts = [Partition(topics.actions, number) for number in range(ISSUE_PARTITIONS)]
    async for record in read_all(bus, parts):
        data = EVENT_TYPES.decode(record.value or b"").data
        assert isinstance(data, Delivery)
        found[data.delivery_id] += data.final
    return found


async def contents(bus: Bus, topics: Topics, wanted: Callable[[Contents], bool]) -> Contents:
    """The dead letters and the ledger, as soon as they are as wanted."""
    deadline = time.monotonic() + 30
    while not wanted(found := await read_contents(bus, topics)):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)
    return found


async def again(bus: Bus, topics: Topics, letter_id: str | None = None) -> Redriven:
    return await redrive(bus, topics, letter_id, by="ana", now_ms=time.time_ns() // 1_000_000)


async def test_workers_share_and_one_takes_over_from_one_that_is_killed(
    world: World, bus: Bus, topics: Topics, tmp_path: Path
) -> None:
    runs = [f"run-{number}" for number in range(24)]
    async with fault_server() as server:
        url = server.url("/cycle/204,503,204")
        words = (world.url, url, str(tmp_path / "keys"), "-", "60")
        child = Forked(
            [sys.executable, "-m", "support.processes.actions", *words],
            env={**os.environ, "PYTHONPATH": str(TESTS), "TOCSIN_PREFIX": topics.prefix},
        )
        try:
            await send(bus, topics, *(issue(run, severity="warning") for run in runs[:4]))
            await until(lambda: len(server.ids()) >= 4)
            async with worker(bus, topics, url) as metrics:
                await until(lambda: metrics.value(names.PARTITIONS, service="actions") == 6)
                await send(bus, topics, *(issue(run, severity="warning") for run in runs[4:16]))
                await until(lambda: len(set(server.ids())) == 16)
                here = metrics.value(names.ATTEMPTS, kind="webhook")
                assert 0 < here < len(server.ids()) - 4, "both had a part of the work"

                await send(bus, topics, *(issue(run, severity="warning") for run in runs[16:]))
                await until(lambda: len(set(server.ids())) > 16)
                os.kill(child.pid, signal.SIGKILL)
                await until(lambda: len(set(server.ids())) == len(runs))
                await contents(bus, topics, lambda one: all(d.final for d in one.ledger.values()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            await asyncio.to_thread(child.wait, 10)
        ended = await finals(bus, topics)
        assert set(ended) == set(server.ids()), "one id for each, whoever sent it"
        assert set(ended.values()) == {1}
        assert len(ended) == len(runs)


async def test_what_failed_is_sent_once_more_and_never_twice(bus: Bus, topics: Topics) -> None:
    async with fault_server() as server:
        url = server.url("/then/404,404,404,503,204")
        async with worker(bus, topics, url):
            issues = [issue(episode=str(number), severity="warning") for number in range(3)]
            await send(bus, topics, *issues)
            found = await contents(bus, topics, lambda one: len(one.letters) == 3)
            rejected = [letter.letter_id for letter in found.letters]
            assert sorted(rejected) == sorted(server.ids())
            assert {state_of(letter, found.ledger) for letter in found.letters} == {"rejected"}

            first = choose_letter(found.letters, rejected[0][:8]).letter_id
            result = await again(bus, topics, first)
            assert (result.sent, result.skipped) == ([first], {})
            found = await contents(bus, topics, lambda one: one.ledger[first].state == "delivered")
            assert server.ids()[3:] == [first, first], "the same id, and tried until it works"
            assert found.ledger[first].redrives == 1

            result = await again(bus, topics)
            assert set(result.sent) == {one for one in rejected if one != first}
            assert result.skipped == {first: "it is delivered already"}
            await contents(
                bus, topics, lambda one: {d.state for d in one.ledger.values()} == {"delivered"}
            )
            result = await again(bus, topics)
            assert result.sent == []
            assert as_text(result, single=True)[0].endswith("it is delivered already")
            with pytest.raises(ConfigurationError, match="no dead letters to 'mail'"):
                await redrive(bus, topics, None, receiver="mail", by="ana", now_ms=1)
    sent = Counter(server.ids())
    assert {one: sent[one] for one in rejected} == {one: 2 + (one == first) for one in rejected}
    assert set((await finals(bus, topics)).values()) == {2}, "rejected, and then delivered"


async def test_a_record_that_could_not_be_used_is_written_back_as_it_was(
    bus: Bus, topics: Topics
) -> None:
    sick = Outgoing(Partition(topics.issues, 3), b"run", b"\xff{", (("tocsin-type", b"x.y"),))
    async with fault_server() as server, worker(bus, topics, server.url("/status/204")):
        producer = await bus.producer()
        await producer.publish([sick])
        await producer.close()
        found = await contents(bus, topics, lambda one: len(one.letters) == 1)
        (letter,) = found.letters
        assert letter.letter_id == f"{topics.issues}/3/0"
        assert (await again(bus, topics)).sent == [letter.letter_id]
        # It still cannot be used: a dead letter of its own. The first one is done with.
        found = await contents(bus, topics, lambda one: len(one.letters) == 2)
        states = {one.letter_id: state_of(one, found.ledger) for one in found.letters}
        assert states == {f"{topics.issues}/3/0": "redriven", f"{topics.issues}/3/1": "waiting"}
        assert found.letters[1].record.value == sick.value
        result = await again(bus, topics, letter.letter_id)
        assert result.skipped == {letter.letter_id: "it was written back already"}
