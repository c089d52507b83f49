"""What a listener says while its bus breaks, and is opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from support.waiting import until
from tocsin.bus.port import BusUnavailable, Outgoing
from tocsin.emitter.send.publisher import Publisher
from tocsin.schemas.records.stops import StopAcknowledged
from tocsin.schemas.records.wire import read_meta
from tocsin.schemas.topics import Topics


class Taking:
    """A producer; with `works` False its bus has broken."""

    def __init__(self, *, works: bool) -> None:
        self.works = works
        self.asked = 0
        self.taken: list[Outgoing] = []

    async def publish(self, records: Sequence[Outgoing], /) -> Sequence[int]:
        self.asked += 1
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
