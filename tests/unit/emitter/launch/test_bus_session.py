"""What a launcher has open: where what it publishes stands among what the job has written."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

from support.buses import record
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.spool import SpooledBus
from tocsin.bus.port import EARLIEST, Partition
from tocsin.emitter.launch.bus_session import Watch
from tocsin.emitter.launch.options import LaunchOptions
from tocsin.emitter.send.publisher import Publisher
from tocsin.schemas.records.runs import Heartbeat
from tocsin.schemas.topics import Topics, telemetry_partition

TOPICS = Topics("tocsin")
HERE = Partition(TOPICS.telemetry, telemetry_partition("r1"))


class Written(SpooledBus):
    """An embedded bus that nobody reads yet."""

    url = "embedded:made"


def beat(step: int) -> Heartbeat:
    return Heartbeat(
        run_id="r1", incarnation="i1", rank=0, world_size=1, role="launcher", last_step=step,
        steps_in_flight=False,
    )  # fmt: skip


async def test_the_end_stands_behind_what_the_job_has_written_and_nobody_has_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bus.db"
    options = LaunchOptions(
        command=("true",), run_id="r1", job_id="j1", bus_url=Written.url,
        open_bus=lambda: EmbeddedBus(path),
    )  # fmt: skip
    clock = itertools.count(1_000).__next__
    async with Written(path, clock) as bus, SpooledBus(path, clock) as rank:
        await bus.init(TOPICS.specs())
        await rank.init(TOPICS.specs())
        publisher = Publisher(TOPICS, "r1")
        view = cast(Any, None)  # nothing is read
        producer = await bus.producer()
        watch = Watch(cast(Any, bus), publisher, producer, view, (), options, print, as_wanted)
        watch.start("publish", publisher.run(watch.producer))
        publisher.publish(beat(1))
        assert await publisher.flush(5.0)
        await (await rank.producer()).publish([record(HERE, b"rank")])
        await watch.publish_behind()
        publisher.publish(beat(2))
        assert await publisher.flush(5.0)
        await watch.close(1.0)

    async with EmbeddedBus(path) as read:
        order = await keys_in_order(read)
    assert order == [b"r1", b"rank", b"r1"]


def as_wanted(wanted_s: float) -> float:
    return wanted_s


async def keys_in_order(bus: EmbeddedBus) -> list[bytes]:
    reader = await bus.reader({HERE: EARLIEST})
    found = [each.key for each in await reader.poll(timeout_s=5.0)]
    await reader.close()
    return found
