"""A bus whose file a child process opens: what befalls the file befalls the child."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.waiting import HANGS_S, SOON_S
from tocsin.bus.embedded import child_reader
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.child_reader import UnmappedBus
from tocsin.bus.port import (
    EARLIEST,
    BusClosed,
    BusUnavailable,
    Outgoing,
    Partition,
    Reader,
    Record,
    UnusableBus,
)
from tocsin.bus.reading import read_to_end
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import Topics

TOPICS = Topics("tocsin")
CONTROL = Partition(TOPICS.control, 0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_reader, "START_PAUSE_S", 0.0)


def record(number: int) -> Outgoing:
    return Outgoing(CONTROL, b"k", b"%d" % number)


async def read(reader: Reader, count: int) -> list[bytes | None]:
    """So many values; the bus may be away for a while."""
    found: list[Record] = []
    async with asyncio.timeout(SOON_S):
        while len(found) < count:
            try:
                found += await reader.poll(timeout_s=1.0)
            except BusUnavailable:
                await asyncio.sleep(0.02)
    return [each.value for each in found]


async def ended(pid: int | None) -> int:
    """How that child ended."""
    assert pid is not None
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    return os.waitstatus_to_exitcode(status)


def has_open(path: Path) -> bool:
    """Whether this process has a file of that bus open, or mapped."""
    opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    files = {str(path), f"{path}-wal", f"{path}-shm"}
    return bool(files & opened) or path.name in Path("/proc/self/maps").read_text()


def remove(path: Path) -> None:
    """The whole bus."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


async def publish(path: Path, numbers: Sequence[int]) -> None:
    """As another process does, with the file open."""
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        await (await bus.producer()).publish([record(number) for number in numbers])


async def test_it_writes_and_reads_and_this_process_opens_nothing_of_the_bus(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bus.db"
    async with UnmappedBus(path) as bus:
        states = await bus.init(TOPICS.specs())
        assert all(state.exists for state in states)
        reader = await bus.reader({CONTROL: EARLIEST})
        await (await bus.producer()).publish([record(1), record(2)])
        assert await read(reader, 2) == [b"1", b"2"]
        assert await reader.position(CONTROL) == 2
        assert await reader.ends([CONTROL]) == {CONTROL: 2}
        assert not has_open(path)
        pid = bus.pid
    with pytest.raises(BusClosed):
        await bus.call("ends", 0, [CONTROL])
    assert await ended(pid) == 0


async def test_a_child_that_is_killed_has_a_successor_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with UnmappedBus(path) as bus:
        await bus.init(TOPICS.specs())
        reader = await bus.reader({CONTROL: EARLIEST})
        await publish(path, [1, 2])
        assert await read(reader, 2) == [b"1", b"2"]
        first = bus.pid
        os.truncate(f"{path}-shm", 0)
        await (await bus.producer()).publish([record(3)])
        assert await read(reader, 1) == [b"3"]
        assert await ended(first) == -signal.SIGBUS
        assert bus.pid != first


async def test_a_poll_that_is_given_up_loses_no_record(tmp_path: Path) -> None:
    async with UnmappedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        reader = await bus.reader({CONTROL: EARLIEST})
        polling = asyncio.create_task(reader.poll(timeout_s=SOON_S))
        await asyncio.sleep(0)
        polling.cancel()
        await asyncio.wait({polling})
        await (await bus.producer()).publish([record(1)])
        assert await reader.position(CONTROL) == 0
        assert await read(reader, 1) == [b"1"]


async def test_what_was_deleted_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    path, long_ago_ms = tmp_path / "bus.db", unix_ms() - 30 * 86_400_000
    async with EmbeddedBus(path, clock=lambda: long_ago_ms) as old:
        await old.init(TOPICS.specs())
        producer = await old.producer()
        await producer.publish([record(1), Outgoing(CONTROL, b"2", None)])
    async with EmbeddedBus(path) as now:
        assert (await now.maintain(1_000)).compacted == 1
    async with UnmappedBus(path) as bus:
        reader = await bus.reader({CONTROL: EARLIEST})
        ends = await reader.ends([CONTROL])
        async with asyncio.timeout(HANGS_S):
            values = [one.value async for records in read_to_end(reader, ends) for one in records]
        assert values == [b"1"]
        assert await reader.position(CONTROL) == ends[CONTROL] == 2


async def test_a_successor_that_finds_another_file_begins_at_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with UnmappedBus(path) as bus:
        await bus.init(TOPICS.specs())
        reader = await bus.reader({CONTROL: EARLIEST})
        await publish(path, [1, 2])
        await read(reader, 2)
        assert bus.pid is not None
        os.kill(bus.pid, signal.SIGKILL)
        remove(path)
        await publish(path, [3])
        assert await read(reader, 1) == [b"3"]


async def test_a_bus_that_cannot_be_opened_is_said_as_without_a_child(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    path.write_bytes(b"no database" * 1_000)
    with pytest.raises(UnusableBus, match="not an SQLite file"):
        await UnmappedBus(path).__aenter__()
