"""What only an embedded bus meets: its file, its processes, its disk, and what it costs."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from support.buses import Notes, World, all_values, assigned, collect, partitions, record, until
from support.waiting import SOON_S
from tocsin.bus.embedded import groups, leases, tables
from tocsin.bus.embedded import reader as embedded_reader
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.doorbell import Bell, Doorbell, bell_folder, topic_mask
from tocsin.bus.embedded.intake import Intake
from tocsin.bus.embedded.tables import APPLICATION_ID
from tocsin.bus.port import (
    EARLIEST,
    LATEST,
    Bus,
    BusClosed,
    BusUnavailable,
    FencedMember,
    Partition,
    UnusableBus,
)
from tocsin.schemas.topics import TopicSpec


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World("embedded", f"embedded:{tmp_path / 'bus.db'}")


@pytest.fixture
async def bus(world: World) -> AsyncIterator[Bus]:
    async with world.bus() as opened:
        yield opened


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus.db"


async def test_a_full_disk_is_said_and_what_was_acknowledged_stays(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])

    child = world.child("full", spec.name, str(5_000_000))
    said, _ = await asyncio.to_thread(child.communicate, timeout=30)

    first, second = said.splitlines()
    written, error, message = first.split("|")
    assert int(written) >= 5
    assert error == "BusUnavailable"
    assert world.url.removeprefix("embedded:") in message
    assert int(second) == int(written)
    (values,) = (await all_values(bus, Partition(spec.name, 0))).values()
    assert len(values) == int(written) + 1


async def test_a_corrupt_file_is_named_and_kept(path: Path) -> None:
    put(path, b"this is no database " * 500)

    with pytest.raises(UnusableBus, match=str(path)):
        async with EmbeddedBus(path):
            pass

    assert content(path) == b"this is no database " * 500


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("CREATE TABLE notes (text)", "something else"),
        (f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 99", "format 99"),
    ],
)
async def test_a_file_of_something_else_is_refused(path: Path, statement: str, says: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(statement)
    db.close()

    with pytest.raises(UnusableBus, match=says):
        async with EmbeddedBus(path):
            pass


async def test_a_missing_file_is_made_only_if_asked(path: Path) -> None:
    with pytest.raises(UnusableBus, match="no bus at"):
        async with EmbeddedBus(path, create=False):
            pass
    assert content(path) == b""
    async with EmbeddedBus(path):
        assert content(path)
    async with EmbeddedBus(path, create=False) as bus:
        assert bus.url == f"embedded:{path}"


async def test_a_locked_file_is_waited_for_and_then_said(world: World, path: Path) -> None:
    spec = world.spec()
    place = Partition(spec.name, 0)
    async with EmbeddedBus(path, busy_s=0.2) as bus:
        await bus.init([spec])
        producer = await bus.producer()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        began = time.monotonic()
        with pytest.raises(BusUnavailable, match="locked"):
            await producer.publish([record(place)])
        assert 0.15 < time.monotonic() - began < SOON_S

        other.execute("ROLLBACK")
        other.close()
        assert list(await producer.publish([record(place)])) == [0]


async def test_a_bus_deleted_under_us_is_made_again(world: World, tmp_path: Path) -> None:
    spec = world.spec(partitions=1)
    (place,) = partitions(spec)
    folder = tmp_path / ".tocsin"
    notes = Notes()
    async with EmbeddedBus(folder / "bus.db") as bus, EmbeddedBus(folder / "bus.db") as other:
        await bus.init([spec])
        producer = await bus.producer()
        consumer = await other.consumer("again", [spec.name], listener=notes)
        reader = await other.reader({place: EARLIEST})
        await producer.publish([record(place), record(place)])
        await collect(consumer, 2)
        await collect(reader, 2)
        await consumer.commit({place: 2})

        shutil.rmtree(folder)

        assert list(await producer.publish([record(place, b"k", b"later")])) == [0]
        assert [r.value for r in await collect(reader, 1)] == [b"later"]
        assert [r.value for r in await collect(consumer, 1)] == [b"later"]
        assert notes.revoked == [{place}]
        await consumer.commit({place: 1})
        began = time.monotonic()
        waiting = asyncio.create_task(reader.poll(timeout_s=4 * SOON_S))
        await asyncio.sleep(0.05)
        await producer.publish([record(place)])
        assert len(await waiting) == 1
        assert time.monotonic() - began < SOON_S


async def test_writers_of_two_processes_share_a_partition(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    children = [world.child("flood", spec.name, "100", "20000") for _ in range(2)]
    for child in children:
        assert await asyncio.to_thread(child.wait, 30) == 0
        child.communicate()

    places = partitions(spec)
    reader = await bus.reader(dict.fromkeys(places, EARLIEST))
    records = await collect(reader, 200)
    for place in places:
        assert [r.offset for r in records if r.partition == place] == list(range(50))


async def test_a_child_of_a_fork_is_refused(world: World, bus: Bus) -> None:
    spec = world.spec()
    place = Partition(spec.name, 0)
    await bus.init([spec])
    producer = await bus.producer()

    pid = os.fork()
    if pid == 0:
        try:
            producer.publish([record(place)]).send(None)
        except BusClosed:
            os._exit(0)
        os._exit(1)

    assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0
    assert list(await producer.publish([record(place)])) == [0]


async def filled(bus: Bus, spec: TopicSpec, batches: int) -> int:
    """1.6 MB in each batch of 20 records; returns a time at which all of them have expired."""
    await bus.init([spec])
    producer = await bus.producer()
    for _ in range(batches):
        await producer.publish([record(Partition(spec.name, 0), b"k", bytes(80_000))] * 20)
    return time.time_ns() // 1_000_000 + 10_000


async def test_maintenance_works_in_slices_and_gives_space_back(world: World, path: Path) -> None:
    spec = world.spec(retention_ms=1_000)
    place = Partition(spec.name, 0)
    async with EmbeddedBus(path) as bus:
        late_ms = await filled(bus, spec, 15)
        rounds = [await bus.maintain(1, late_ms)]
        while rounds[-1].more:
            rounds.append(await bus.maintain(1, late_ms))

        assert len(rounds) > 1, "24 MB are more than a round's work"
        assert sum(done.expired for done in rounds) == 300
        assert sum(done.pages_freed for done in rounds) > 500
        assert (await bus.show([spec]))[0].records == 0
        reader = await bus.reader({place: EARLIEST})
        assert await reader.position(place) == 300
    assert len(content(path)) < 10_000_000


async def test_what_nobody_replaces_for_long_is_dropped_from_a_compacted_topic_too(
    world: World, path: Path
) -> None:
    now_ms = [1_800_000_000_000]
    spec = world.spec(cleanup="compact", retention_ms=1_000_000)
    place = Partition(spec.name, 0)
    async with EmbeddedBus(path, clock=lambda: now_ms[0]) as bus:
        await bus.init([spec])
        producer = await bus.producer()
        await producer.publish([record(place, b"left"), record(place, b"renewed", b"1")])
        now_ms[0] += 600_000
        await producer.publish([record(place, b"renewed", b"2")])
        now_ms[0] += 600_000
        await bus.maintain(1_000)
        assert await all_values(bus, place) == {b"renewed": [b"2"]}
        await producer.publish([record(place, b"left", b"3")])
        now_ms[0] += 600_000
        await bus.maintain(1_000)
        assert await all_values(bus, place) == {b"left": [b"3"]}
    db = sqlite3.connect(path)
    assert db.execute("SELECT key FROM newest").fetchall() == [(b"left",)]
    db.close()


async def test_space_that_a_reader_held_up_is_given_back_on_an_idle_bus(
    world: World, path: Path
) -> None:
    spec = world.spec(retention_ms=1_000)
    async with EmbeddedBus(path) as bus:
        late_ms = await filled(bus, spec, 5)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM records").fetchall()

        done = await bus.maintain(10_000, late_ms)
        assert (done.expired, done.more) == (100, False)
        assert len(content(path)) > 5_000_000, "the old pages are still read"

        other.execute("ROLLBACK")
        other.close()
        await bus.maintain(10_000, late_ms)
        assert len(content(path)) < 5_000_000


async def test_offsets_of_a_group_end_with_the_records_that_it_read(
    world: World, path: Path
) -> None:
    spec = world.spec(retention_ms=1_000)
    places = partitions(spec)
    clock = iter([10_000, 11_000])
    async with EmbeddedBus(path, clock=lambda: next(clock)) as bus:
        await bus.init([spec])
        producer = await bus.producer()
        for at in (0, 1):
            await producer.publish([record(places[at])])
        await producer.close()
        gone = await bus.consumer("gone", [spec.name], only=places[:2])
        await gone.commit({places[0]: 1, places[1]: 1})
        await gone.close()
        here = await bus.consumer("here", [spec.name])
        await assigned(here, len(places))
        await here.commit({places[0]: 1})

        assert (await bus.maintain(1_000, 10_500)).offsets == 0
        done = await bus.maintain(1_000, 11_500)
        assert (done.expired, done.offsets) == (1, 1)
        assert await here.committed(places[0]) == 1
        gone = await bus.consumer("gone", [spec.name], only=places[:2])
        assert [await gone.committed(place) for place in places[:2]] == [None, 1]
        assert await gone.position(places[0]) == 1


async def test_append_times_never_fall(world: World, path: Path) -> None:
    spec = world.spec()
    place = Partition(spec.name, 0)
    times = iter([5_000, 4_000, 6_000])
    async with EmbeddedBus(path, clock=lambda: next(times)) as bus:
        await bus.init([spec])
        producer = await bus.producer()
        for _ in range(3):
            await producer.publish([record(place)])
        records = await collect(await bus.reader({place: EARLIEST}), 3)
    assert [r.append_ms for r in records] == [5_000, 5_000, 6_000]


async def test_a_lease_ends_with_its_process(world: World, bus: Bus) -> None:
    child = world.child("lease", "run")
    try:
        assert child.stdout is not None
        assert (await asyncio.to_thread(child.stdout.readline)).strip() == "True"
        assert await bus.leased("run")
        assert await bus.lease("run") is None
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()

    assert not await bus.leased("run")
    lease = await bus.lease("run")
    assert lease is not None
    await asyncio.sleep(0)
    assert await bus.leased("run")
    await lease.release()
    await lease.release()
    assert not await bus.leased("run")


async def test_who_joins_after_a_kill_has_the_dead_member_s_partitions_at_once(
    world: World, bus: Bus, path: Path
) -> None:
    spec = world.spec()
    await bus.init([spec])
    child = world.child("consume", "killed", spec.name)
    try:
        assert child.stdout is not None
        while (await asyncio.to_thread(child.stdout.readline)).strip() != "4":
            pass
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()

    db, catalogue = sqlite3.connect(path, isolation_level=None), tables.TopicCatalogue()
    groups.join(db, "killed", "next", [spec.name], leases.monotonic_ms())
    place = groups.standing(db, catalogue, "killed", "next", [spec.name])
    assert place.share == set(partitions(spec))
    assert groups.claim(db, catalogue, "killed", "next", place.share) == place.share
    db.close()


async def test_a_member_that_was_thought_dead_is_fenced_and_joins_again(
    world: World, bus: Bus, path: Path
) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    notes = Notes()
    consumer = await bus.consumer("dead", [spec.name], listener=notes)
    await assigned(consumer, 4)
    db = sqlite3.connect(path, isolation_level=None)
    with tables.transaction(db, write=True):
        late_ms = leases.monotonic_ms() + leases.TTL_MS + 1
        assert groups.renew(db, "dead", "another", late_ms)
    db.close()

    with pytest.raises(FencedMember):
        await consumer.commit({place: 1})

    async def back() -> bool:
        await consumer.poll(timeout_s=0.05)
        return len(notes.assigned) == 2

    await until(back, "joined again")
    assert notes.revoked == [frozenset(partitions(spec))]
    await consumer.commit({place: 1})


async def test_a_sleeping_reader_is_woken_by_the_doorbell(
    world: World, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it would look only after this poll's time is over.
    monkeypatch.setattr(embedded_reader, "CHECK_INTERVAL_S", 8 * SOON_S)
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    reader = await bus.reader({place: LATEST})
    for _ in range(5):
        waiting = asyncio.create_task(reader.poll(timeout_s=4 * SOON_S))
        await asyncio.sleep(0.005)
        began = time.monotonic()
        await producer.publish([record(place)])
        assert len(await waiting) == 1
        assert time.monotonic() - began < SOON_S


async def test_without_a_socket_a_reader_looks_by_itself(world: World, tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    put(bell_folder(path), b"in the way")
    spec = world.spec()
    place = Partition(spec.name, 0)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
        reader = await bus.reader({place: LATEST})
        waiting = asyncio.create_task(reader.poll(timeout_s=4 * SOON_S))
        await asyncio.sleep(0.02)
        began = time.monotonic()
        await (await bus.producer()).publish([record(place)])
        assert len(await waiting) == 1
        assert time.monotonic() - began < SOON_S


async def test_a_socket_left_behind_is_removed(world: World, bus: Bus, path: Path) -> None:
    spec = world.spec()
    await bus.init([spec])
    left = bell_folder(path) / "1-0-ffffffffffffffff"
    bell = Bell.hang(path, [spec.name])
    assert bell.works
    os.rename(next(bell_folder(path).iterdir()), left)
    bell.close()
    assert left.exists()

    await (await bus.producer()).publish([record(Partition(spec.name, 0))])

    assert not left.exists()


async def test_a_bus_with_a_long_path_has_its_doorbell_beside_it(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = folder / "bus.db"
    bell = Bell.hang(path, ["topic"])
    assert bell.works
    doorbell = Doorbell(path)
    doorbell.ring(topic_mask(["topic"]))
    await bell.wait(timeout_s=10)
    assert bell.pop()
    doorbell.close()
    bell.close()
    assert list(bell_folder(path).iterdir()) == []


async def test_an_opening_that_is_cancelled_leaves_nothing_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert go_on.wait(SOON_S)

    monkeypatch.setattr(Intake, "append_all", wait)
    process = psutil.Process()
    files, threads = process.num_fds(), threading.active_count()
    bus = world.bus()
    opening = asyncio.ensure_future(bus.__aenter__())

    async def is_taking_in() -> bool:
        return begun.is_set()

    async def has_closed_all() -> bool:
        return (process.num_fds(), threading.active_count()) == (files, threads)

    await until(is_taking_in, "spools are taken in")
    assert not opening.done()

    opening.cancel()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(has_closed_all, "its files are closed and its thread has ended")


async def test_an_idle_bus_costs_next_to_nothing(world: World, bus: Bus) -> None:
    spec = world.spec(partitions=48)
    await bus.init([spec])
    reader = await bus.reader(dict.fromkeys(partitions(spec), EARLIEST))
    consumer = await bus.consumer("idle", [spec.name])
    await assigned(consumer, 48)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()

    await asyncio.gather(reader.poll(timeout_s=2.5), consumer.poll(timeout_s=2.5))

    elapsed = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Measured: 0.2 % of a core for both; polling every 5 ms would be over 2 %.
    assert used / elapsed < 0.01
