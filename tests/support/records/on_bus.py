"""Records onto a bus and back from it, and workers that die, for tests of services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from support.waiting import HANGS_S
from tocsin.bus.port import EARLIEST, Bus, BusClosed, Outgoing, Partition, Record
from tocsin.bus.reading import read_to_end
from tocsin.runtime.worker import Worker
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.wire import decode, read_meta


class Died(Exception):
    """In the place of `kill -9`."""


def die() -> None:
    """What a crash point does."""
    raise Died


async def send(bus: Bus, records: Sequence[Record]) -> None:
    """Append records that were made for a test, in their order."""
    producer = await bus.producer()
    await producer.publish([Outgoing(r.partition, r.key, r.value, r.headers) for r in records])
    await producer.close()


async def read_all(bus: Bus, topic: str, number: int) -> list[Record]:
    """All that a partition has now."""
    partition = Partition(topic, number)
    reader = await bus.reader({partition: EARLIEST})
    ends = await reader.ends([partition])
    records = [record async for rows in read_to_end(reader, ends) for record in rows]
    await reader.close()
    return records


async def data_of(bus: Bus, topic: str, number: int) -> list[Data]:
    """What the events of a partition say."""
    found = []
    for record in await read_all(bus, topic, number):
        assert record.value is not None
        event = decode(read_meta(record.headers), record.value)
        assert isinstance(event, Event)
        found.append(event.data)
    return found


async def work(worker: Worker, timeout_s: float = HANGS_S) -> bool:
    """Run it over all that is there; False: it died on the way."""
    task = asyncio.create_task(worker.run())
    caught_up = asyncio.create_task(worker.caught_up(timeout_s))
    await asyncio.wait({task, caught_up}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        # A worker that dies closes its readers before its task has ended.
        with contextlib.suppress(BusClosed):
            assert await caught_up
            worker.stop()
    caught_up.cancel()
    with contextlib.suppress(Died):
        await task
        return True
    return False
