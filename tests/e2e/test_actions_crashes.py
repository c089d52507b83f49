"""An action worker that is killed at each point between consume and commit loses no delivery.

A process of its own on a real bus file, a real HTTP receiver, a stop that a run answers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.fault_server import FaultServer, fault_server
from support.forking import Forked
from support.issue_records import TOPICS, issue, issue_record, view, view_record
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Partition, Record
from tocsin.runtime.testing import CRASH_AT, CRASH_POINTS
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.runs import StopView
from tocsin.schemas.topics import issue_partition

TESTS = Path(__file__).parents[1]
POINTS = (*CRASH_POINTS, "attempting", "attempted")
ISSUES = [issue(episode=str(i)) for i in range(4)]


async def process(
    bus: Path, server: FaultServer, keys: Path, path: str, crash_at: str | None = None
) -> int:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop(CRASH_AT, None)
    if crash_at is not None:
        environment[CRASH_AT] = crash_at
    words = (str(bus), server.url(path), str(keys), "run-1", "20")
    child = Forked([sys.executable, "-m", "support.actions_process", *words], env=environment)
    return await asyncio.to_thread(child.wait, 60)


async def read(bus: EmbeddedBus, topic: str) -> list[Record]:
    partition = Partition(topic, issue_partition("run-1"))
    reader = await bus.reader({partition: EARLIEST})
    end = (await reader.ends([partition]))[partition]
    records: list[Record] = []
    while await reader.position(partition) < end:
        records += await reader.poll(timeout_s=1.0)
    await reader.close()
    return records


async def entries(bus: EmbeddedBus) -> list[Delivery]:
    found = [EVENT_TYPES.decode(r.value or b"").data for r in await read(bus, TOPICS.actions)]
    return [data for data in found if isinstance(data, Delivery)]


@pytest.mark.parametrize("point", POINTS)
async def test_no_delivery_is_lost_or_invented(tmp_path: Path, point: str) -> None:
    await crash_and_check(tmp_path, point, "/then/503,429,204", (1,))


@pytest.mark.torture
@pytest.mark.parametrize("path", ["/status/204", "/then/503,429,204", "/status/404"])
@pytest.mark.parametrize("point", POINTS)
async def test_whatever_the_receiver_answers(tmp_path: Path, point: str, path: str) -> None:
    await crash_and_check(tmp_path, point, path, (1, 1, 2, 3))


async def crash_and_check(tmp_path: Path, point: str, path: str, passes: tuple[int, ...]) -> None:
    async with fault_server() as server, EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        await producer.publish([issue_record(found) for found in ISSUES])
        # The run answers the one stop that it will get; its answer waits on the bus.
        stop_id = delivery_id(ISSUES[0].issue_id, "stop", "firing")
        exited = StopView(state="exited", command_id=stop_id, how="edge", exit_code=79)
        await producer.publish([view_record(view(stop=exited))])

        codes = [
            await process(bus.path, server, tmp_path / "keys", path, crash_at=f"{point}:{nth}")
            for nth in passes
        ]
        # A later process may have nothing left to do at that point.
        assert codes[0] == 137
        assert set(codes) <= {137, 0}
        assert await process(bus.path, server, tmp_path / "keys", path) == 0

        (hook,) = parse_addresses([server.url(path)])
        hooks = {delivery_id(found.issue_id, hook, "firing") for found in ISSUES}
        stops = {delivery_id(found.issue_id, "stop", "firing") for found in ISSUES}
        last: dict[str, Delivery] = {}
        finals: Counter[str] = Counter()
        for entry in await entries(bus):
            last[entry.delivery_id] = entry
            finals[entry.delivery_id] += entry.final
        assert set(last) == hooks | stops
        assert set(finals.values()) == {1}, "each delivery reaches one final state, once"
        wanted = "rejected" if path == "/status/404" else "delivered"
        assert {last[identity].state for identity in hooks} == {wanted}
        assert Counter(last[identity].state for identity in stops) == {
            "delivered": 1,
            "suppressed": 3,
        }
        assert set(server.ids()) == hooks, "equal ids on repeats, and no other"
        commands = {(r.key, r.value, r.headers) for r in await read(bus, TOPICS.control)}
        assert len(commands) == 1, "a stop that is sent again is the same to the byte"
