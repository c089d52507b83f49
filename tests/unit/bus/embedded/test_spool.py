"""What a training writes beside an embedded bus is in it once, in order, whatever happens."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.buses import all_values, collect, record
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.intake import Intake
from tocsin.bus.embedded.spool import (
    Entry,
    Spool,
    SpooledBus,
    SpoolWriter,
    encode,
    has_spools,
    parse,
    spool_folder,
)
from tocsin.bus.port import EARLIEST, BusUnavailable, MissingBus, Outgoing, Partition, UnknownTopic
from tocsin.schemas.errors import RecordTooLarge
from tocsin.schemas.topics import TopicSpec

SPEC = TopicSpec("t", 4, "delete", retention_ms=3_600_000)
HERE = Partition("t", 1)


def values(*numbers: int) -> list[Outgoing]:
    return [record(HERE, value=b"%d" % number) for number in numbers]


WriterAt = Callable[..., Awaitable[SpoolWriter]]


@pytest.fixture
async def writer_at() -> AsyncIterator[WriterAt]:
    """Opens writers, which are closed at the end."""
    async with AsyncExitStack() as stack:

        async def open_writer(path: Path, clock: Callable[[], int] = lambda: 1_000) -> SpoolWriter:
            bus = await stack.enter_async_context(SpooledBus(path, clock))
            await bus.init([SPEC])
            return await bus.producer()

        yield open_writer


async def found(path: Path, *, create: bool = False) -> list[bytes | None]:
    async with EmbeddedBus(path, create=create) as bus:
        return (await all_values(bus, HERE)).get(b"k", [])


def segments(path: Path) -> list[Path]:
    return sorted(each for each in spool_folder(path).iterdir() if "-" in each.name)


async def test_whoever_opens_the_bus_finds_what_a_dead_writer_left(
    tmp_path: Path, writer_at: WriterAt
) -> None:
    path = tmp_path / ".tocsin" / "bus.db"
    with pytest.raises(MissingBus):
        await found(path)
    writer = await writer_at(path)
    await writer.publish(values(0, 1))
    await writer.publish([Outgoing(HERE, b"k", None, (("name", b"value"),))])
    assert not path.exists()
    await writer.close()
    assert await found(path) == [b"0", b"1", None]
    assert segments(path) == []
    assert await found(path) == [b"0", b"1", None]


async def test_a_reader_is_woken_and_the_append_time_is_the_writers(
    tmp_path: Path, writer_at: WriterAt
) -> None:
    path = tmp_path / "bus.db"
    writer = await writer_at(path, lambda: 5_000)
    async with EmbeddedBus(path) as bus:
        await bus.init([SPEC])
        reader = await bus.reader({HERE: EARLIEST})
        await writer.publish(values(7))
        (got,) = await collect(reader, 1)
        assert (got.value, got.append_ms, got.headers) == (b"7", 5_000, (("tocsin-type", b"test"),))


async def test_what_was_acknowledged_before_a_publish_comes_before_it(
    tmp_path: Path, writer_at: WriterAt
) -> None:
    path = tmp_path / "bus.db"
    writer = await writer_at(path)
    async with EmbeddedBus(path) as bus:
        await bus.init([SPEC])
        producer = await bus.producer()
        for number in range(0, 10, 2):
            await writer.publish(values(number))
            await producer.publish(values(number + 1))
        assert (await all_values(bus, HERE))[b"k"] == [b"%d" % number for number in range(10)]


async def test_two_buses_take_each_record_in_once(tmp_path: Path, writer_at: WriterAt) -> None:
    path = tmp_path / "bus.db"
    writers = [await writer_at(path) for _ in range(2)]
    async with EmbeddedBus(path) as one, EmbeddedBus(path) as other:
        await one.init([SPEC])
        elsewhere = Partition("t", 0)
        readers = [await bus.reader({elsewhere: EARLIEST}) for bus in (one, other)]
        for number in range(100):
            for key, writer in zip((b"a", b"b"), writers, strict=True):
                await writer.publish([record(HERE, key, b"%d" % number)])
            await asyncio.gather(*(reader.ends([HERE]) for reader in readers))
        there = await all_values(other, HERE)
    expected = [b"%d" % number for number in range(100)]
    assert there == {b"a": expected, b"b": expected}


async def test_a_taking_in_that_is_killed_in_the_middle_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer_at: WriterAt
) -> None:
    path = tmp_path / "bus.db"
    writer = await writer_at(path)
    await writer.publish(values(*range(5)))
    await writer.close()
    original, failures = Intake._append_entry, [True]

    def fail_once(self: Intake, *args: object) -> set[str]:
        topics = original(self, *args)  # type: ignore[arg-type]
        if topics and failures:
            failures.pop()
            raise sqlite3.OperationalError("killed")
        return topics

    monkeypatch.setattr(Intake, "_append_entry", fail_once)
    async with EmbeddedBus(path):
        pass
    assert await found(path, create=True) == [b"0", b"1", b"2", b"3", b"4"]
    assert not failures


async def test_a_segment_that_somebody_else_finishes_meanwhile_is_taken_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer_at: WriterAt
) -> None:
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as bus:
        await bus.init([SPEC])
        writer = await writer_at(path)
        await writer.publish(values(*range(5)))
        original, others = Intake._append_chunk, [1]

        def after_another(self: Intake, *args: Any) -> int:
            """Between the look at a segment and the reading of it, all is done elsewhere."""
            while others:
                others.pop()
                asyncio.run(_end_and_take_in(writer, path))
            return original(self, *args)

        monkeypatch.setattr(Intake, "_append_chunk", after_another)
        reader = await bus.reader({HERE: EARLIEST})
        await reader.ends([HERE])
        assert (await all_values(bus, HERE))[b"k"] == [b"%d" % number for number in range(5)]


async def _end_and_take_in(writer: SpoolWriter, path: Path) -> None:
    await writer.close()
    async with EmbeddedBus(path):
        pass


async def test_segments_follow_each_other_and_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    spool = Spool(path, [SPEC], lambda: 1, segment_bytes=2_000, limit_bytes=10_000)
    numbers = iter(range(1_000))
    sent: list[bytes] = []

    def fill() -> None:
        for number in numbers:
            spool.append(values(number))
            sent.append(b"%d" % number)

    with pytest.raises(BusUnavailable, match="nobody has taken in"):
        fill()
    assert len(segments(path)) > 3
    again = Spool(path, [SPEC], lambda: 1, limit_bytes=10_000)
    with pytest.raises(BusUnavailable, match="nobody has taken in"):
        again.append(values(0))
    assert await found(path, create=True) == sent
    # The newest may go on; the others are gone.
    assert len(segments(path)) <= 1
    spool.append(values(77))
    spool.close()
    assert await found(path) == [*sent, b"77"]


@pytest.mark.parametrize("harm", ["delete", "truncate", "cut", "overwrite", "extend", "rmtree"])
async def test_a_spool_that_is_harmed_costs_no_later_record(
    tmp_path: Path, harm: str, writer_at: WriterAt
) -> None:
    path = tmp_path / ".tocsin" / "bus.db"
    writer = await writer_at(path)
    await writer.publish(values(0))
    assert await found(path, create=True) == [b"0"]
    await writer.publish(values(1))
    (segment,) = segments(path)
    size = segment.stat().st_size
    if harm == "delete":
        segment.unlink()
    elif harm == "rmtree":
        shutil.rmtree(path.parent)
    elif harm == "truncate":
        os.truncate(segment, 0)
    elif harm == "cut":
        os.truncate(segment, size - 3)
    elif harm == "extend":
        with segment.open("ab") as file:
            file.write(b"x" * 100)
    else:
        with segment.open("r+b") as file:
            file.write(b"x" * size)
        await found(path)
    await writer.publish(values(2))
    await writer.publish(values(3))
    there = await found(path, create=True)
    assert there[-2:] == [b"2", b"3"]
    assert len(there) == len(set(there))


async def test_another_bus_file_gets_the_topics_and_what_was_not_taken_in(
    tmp_path: Path, writer_at: WriterAt
) -> None:
    path = tmp_path / "bus.db"
    writer = await writer_at(path)
    await writer.publish(values(0))
    assert await found(path, create=True) == [b"0"]
    await writer.publish(values(1))
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    assert (await found(path))[-1] == b"1"


async def test_what_the_bus_would_refuse_is_refused_at_once(
    tmp_path: Path, writer_at: WriterAt
) -> None:
    writer = await writer_at(tmp_path / "bus.db")
    with pytest.raises(UnknownTopic):
        await writer.publish([record(Partition("nothing", 0))])
    with pytest.raises(RecordTooLarge):
        await writer.publish([record(HERE, value=bytes(3_000_000))])
    assert not has_spools(tmp_path / "bus.db")
    # Larger than one entry may be, by its count of records.
    await writer.publish([record(HERE, value=b"%d" % n + bytes(1_900_000)) for n in range(12)])
    assert len(await found(tmp_path / "bus.db", create=True)) == 12


async def test_somebody_elses_file_among_the_spools_is_left_alone(
    tmp_path: Path, writer_at: WriterAt
) -> None:
    path = tmp_path / "bus.db"
    writer = await writer_at(path)
    await writer.publish(values(1))
    target = tmp_path / "mine"
    target.write_bytes(b"precious")
    folder = spool_folder(path)
    (folder / f"{'a' * 32}-000000").symlink_to(target)
    os.mkfifo(folder / f"{'b' * 32}-000000")
    (folder / "notes.txt").write_text("x")
    assert await found(path, create=True) == [b"1"]
    assert target.read_bytes() == b"precious"
    assert (folder / f"{'b' * 32}-000000").exists()


def test_any_bytes_are_parsed() -> None:
    draw = random.Random(0)
    whole = encode(Entry(1, topics=(SPEC,))) + encode(Entry(2, tuple(values(1, 2))))
    assert [entry.written_ms for entry in parse(whole).entries] == [1, 2]
    for _ in range(3_000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        del data[draw.randint(0, len(data)) :]
        parsed = parse(bytes(data))
        assert parsed.used <= len(data)
        assert len(parsed.entries) <= 2
