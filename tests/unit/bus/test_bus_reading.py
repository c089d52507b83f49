"""Reading to the end that was seen first, on a real bus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, BusUnavailable, Outgoing, Partition
from tocsin.bus.reading import read_to_end
from tocsin.schemas.topics import TopicSpec

SPEC = TopicSpec("t", 2, "delete", retention_ms=3_600_000)
P0, P1 = Partition("t", 0), Partition("t", 1)


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init([SPEC])
        yield bus


async def test_it_reads_what_is_there_and_ends(bus: EmbeddedBus) -> None:
    producer = await bus.producer()
    await producer.publish([Outgoing(P0, b"k", b"%d" % n) for n in range(25)])
    await producer.publish([Outgoing(P1, b"k", b"other")])
    reader = await bus.reader({P0: EARLIEST, P1: EARLIEST})
    ends = await reader.ends([P0, P1])

    found = [r.value async for rows in read_to_end(reader, ends, max_records=10) for r in rows]

    assert [value for value in found if value != b"other"] == [b"%d" % n for n in range(25)]
    assert found.count(b"other") == 1
    assert [rows async for rows in read_to_end(reader, ends)] == []


async def test_it_does_not_wait_for_ever_for_what_does_not_come(bus: EmbeddedBus) -> None:
    reader = await bus.reader({P0: EARLIEST})
    nothing = read_to_end(reader, {P0: 1}, quiet_s=0.02)
    with pytest.raises(BusUnavailable, match="no records came"):
        await anext(nothing)
