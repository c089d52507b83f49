"""What a publisher does while its bus breaks, refuses records, and is opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from support.waiting import until
from tocsin.bus.port import BusError, BusUnavailable, Outgoing, UnusableBus
from tocsin.emitter.send.publisher import Publisher
from tocsin.schemas.records.frames import RecordOrigin, SystemFrame
from tocsin.schemas.records.stops.commands import StopAcknowledged
from tocsin.schemas.records.wire import read_meta
from tocsin.schemas.topics import Topics


class Taking:
    """A producer; with `works` False its bus has broken, or `refuses`."""

    def __init__(self, *, works: bool, refuses: BusError | None = None) -> None:
        self.works = works
        self.refuses = refuses
        self.asked = 0
        self.taken: list[Outgoing] = []

    async def publish(self, records: Sequence[Outgoing], /) -> Sequence[int]:
        self.asked += 1
        if self.refuses is not None:
            raise self.refuses
        if not self.works:
            raise BusUnavailable("away")
        self.taken += records
        return range(len(records))

    @property
    def closed(self) -> bool:
        return False

    async def close(self) -> None:
        return


async def test_what_was_said_before_and_between_two_buses_is_published_on_the_second() -> None:
    publisher = Publisher(Topics(), "r1", who="listener")

    def answer(name: str) -> None:
        publisher.publish(StopAcknowledged(run_id="r1", incarnation="i1", command_id=name))

    answer("before-any")
    broken, working = Taking(works=False), Taking(works=True)
    first = asyncio.create_task(publisher.run(broken))
    await until(lambda: broken.asked)
    first.cancel()
    await asyncio.wait({first})
    answer("between")
    second = asyncio.create_task(publisher.run(working))
    await until(lambda: len(working.taken) == 2)
    answer("on-the-second")
    assert await publisher.flush(20)
    assert publisher.unpublished == 0
    second.cancel()
    names = ("before-any", "between", "on-the-second")
    for seq, (record, name) in enumerate(zip(working.taken, names, strict=True)):
        assert record.value is not None
        assert name.encode() in record.value
        assert read_meta(record.headers).seq == seq


def frame(step: int) -> SystemFrame:
    """One sample, of that time."""
    return SystemFrame(
        origin=RecordOrigin(run_id="r1", incarnation="i1"),
        node="n",
        at_us=np.array([step], np.uint64),
        columns=("cpu.percent",),
        values=np.zeros((1, 1)),
    )


async def test_the_newest_samples_wait_for_a_bus_that_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(Topics(), "r1", queued=2)
    for step in range(4):
        publisher.publish_frame(frame(step))
    working = Taking(works=True)
    await publisher.finish(working, 20)

    # By the gap in front readers see that some were dropped.
    assert [read_meta(record.headers).seq for record in working.taken] == [2, 3]
    assert publisher.unpublished == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_finishing_ends_in_time_where_the_bus_is_away() -> None:
    publisher = Publisher(Topics(), "r1", queued=2)
    publisher.publish_frame(frame(0))
    await publisher.finish(Taking(works=False), 0.01)
    assert publisher.unpublished == 1


async def test_who_can_open_the_bus_anew_hears_that_it_refuses() -> None:
    refusing = Taking(works=True, refuses=UnusableBus("a file of something else"))
    publisher = Publisher(Topics(), "r1", ends_if_refused=True)
    publisher.publish_frame(frame(0))
    with pytest.raises(UnusableBus):
        await publisher.run(refusing)
    assert publisher.dropped == 1


async def test_who_cannot_goes_on_without_what_the_bus_refused() -> None:
    bus = Taking(works=True, refuses=UnusableBus("full"))
    publisher = Publisher(Topics(), "r1")
    publisher.publish_frame(frame(0))
    running = asyncio.create_task(publisher.run(bus))
    assert await publisher.flush(20)
    bus.refuses = None
    publisher.publish_frame(frame(1))
    assert await publisher.flush(20)
    running.cancel()
    assert [read_meta(record.headers).seq for record in bus.taken] == [1]
