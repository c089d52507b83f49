"""Digests on either bus: one for each interval, from several workers and after a restart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from support.at_work import at_work
from support.buses import World
from support.configured_buses import context_on
from support.records.issues import issue, issue_record, view, view_record
from support.servers.receiver import Receiver, http_receiver
from support.waiting import until
from tocsin.actions.composition import build_actions_service
from tocsin.actions.digests.intervals import ALL_RUNS, DueDigest
from tocsin.bus.port import Bus, Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import read_view
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import DIGEST
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import issue_partition, telemetry_partition

DAY_MS = 86_400_000
KEY = SigningKey.generate()


@asynccontextmanager
async def worker(bus: Bus, context: CommandContext) -> AsyncIterator[None]:
    """An action worker, ready."""
    service = build_actions_service(
        context.topics, context.config, bus=bus, key=KEY, secrets={}, embedded=True
    )
    made = Worker(
        bus,
        service,
        topics=context.topics,
        group=f"{context.topics.prefix}-actions",
        settings=WorkerSettings(checkpoint_s=0.05),
    )
    async with at_work(made):
        await made.ready.wait()
        yield


async def publish(bus: Bus, topic: str, number: int, sent: Outgoing) -> None:
    producer = await bus.producer()
    await producer.publish([replace(sent, partition=Partition(topic, number))])
    await producer.close()


def kinds(receiver: Receiver) -> Counter[str]:
    """What came in, by the type of the event."""
    return Counter(json.loads(request.body)["type"] for request in receiver.requests)


async def test_each_interval_has_one_digest(world: World, bus: Bus, tmp_path: Path) -> None:
    with http_receiver() as receiver:
        more = f"receivers: {{hook: {{type: webhook, url: '{receiver.url}', digest: 24h}}}}\n"
        context = context_on(world, tmp_path, f"{more}rules: [nonfinite: [hook]]\n")
        topics = context.topics
        await bus.init(topics.specs())
        running = view().model_copy(update={"started_ms": 1, "last_step": 7})
        await publish(bus, topics.runs, telemetry_partition("run-1"), view_record(running))
        began_ms = unix_ms()

        async with worker(bus, context), worker(bus, context):
            await until(lambda: kinds(receiver)["tocsin.digest"] > 0)
        async with worker(bus, context):
            # What is decided about an issue comes after what is decided about digests.
            found = issue(stop_worthy=False)
            await publish(bus, topics.issues, issue_partition("run-1"), issue_record(found))
            await until(lambda: kinds(receiver)["tocsin.issue.firing"] > 0)

        ids = Counter(
            request.headers["webhook-id"]
            for request in receiver.requests
            if json.loads(request.body)["type"] == "tocsin.digest"
        )
        # The day may have ended meanwhile.
        days = {DueDigest.last("hook", ALL_RUNS, DAY_MS, at) for at in (began_ms, unix_ms())}
        assert ids.keys() <= {due.delivery_id for due in days}
        assert set(ids.values()) == {1}
        (data,) = {
            json.dumps(json.loads(request.body)["data"]["runs"])
            for request in receiver.requests
            if "runs" in json.loads(request.body)["data"]
        }
        assert json.loads(data) == [{"run_id": "run-1", "state": "running", "last_step": 7}]
        entries = [one for one in (await read_view(bus, topics)).deliveries]
        digests = [one for one in entries if one.occasion == DIGEST]
        assert [one.state for one in digests] == ["delivered"] * len(ids)
