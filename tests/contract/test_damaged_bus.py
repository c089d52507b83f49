"""The file of an embedded bus is damaged: it is set aside, and everybody goes on with a new one."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.buses import World, collect, partitions, record
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.connection import BusFile
from tocsin.bus.port import EARLIEST, Partition, Record, UnusableBus


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World("embedded", f"embedded:{tmp_path / 'bus.db'}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus.db"


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def content(path: Path) -> bytes:
    return path.read_bytes()


def inside(path: Path) -> None:
    """All but the first page."""
    whole = content(path)
    put(path, whole[:16_384] + b"\xa5" * (len(whole) - 16_384))


def at_the_head(path: Path) -> None:
    put(path, b"\x5a" * 100 + content(path)[100:])


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [inside, at_the_head], ids=lambda damage: damage.__name__)
async def test_a_file_damaged_under_us_is_set_aside_and_what_comes_then_is_kept(
    world: World, path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    spec = world.spec(partitions=1)
    (place,) = partitions(spec)
    async with EmbeddedBus(path) as bus, EmbeddedBus(path) as other:
        await bus.init([spec])
        producer = await bus.producer()
        consumer = await other.consumer("damaged", [spec.name])
        reader = await other.reader({place: EARLIEST})
        await producer.publish([record(place, value=bytes(200_000))] * 2)
        await collect(consumer, 2)
        await collect(reader, 2)
        # Into the file itself, with nothing left in the log beside it.
        db = sqlite3.connect(path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        damage(path)
        damaged = content(path)

        # Whoever finds it, all go on with one new file.
        assert list(await producer.publish([record(place, b"k", b"later")])) == [0]
        assert [r.value for r in await collect(reader, 1)] == [b"later"]
        assert [r.value for r in await collect(consumer, 1)] == [b"later"]
        await consumer.commit({place: 1})

    aside = path.with_name("bus.db.damaged-1")
    assert content(aside) == damaged, "what it held can still be looked for"
    assert list(path.parent.glob("*.damaged-2")) == []
    (said,) = [record for record in caplog.records if "set aside" in record.message]
    assert str(path) in said.message
    assert aside.name in said.message


@pytest.mark.parametrize(
    "damage", [inside, at_the_head, cut_off], ids=lambda damage: damage.__name__
)
async def test_a_file_damaged_while_nobody_looked_is_set_aside(
    world: World, path: Path, damage: Callable[[Path], None]
) -> None:
    spec = world.spec()
    place = Partition(spec.name, 0)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
        await (await bus.producer()).publish([record(place, b"k", bytes(200_000))])
    damage(path)
    damaged = content(path)

    with pytest.raises(UnusableBus, match=str(path)):
        async with EmbeddedBus(path, create=False) as bus:
            await bus.reader({place: EARLIEST})
    assert content(path) == damaged, "who only looks changes nothing"

    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
        producer = await bus.producer()
        await producer.publish([record(place, b"k", b"later")])
        assert [r.value for r in await collect(await bus.reader({place: EARLIEST}), 1)] == [
            b"later"
        ]
    assert content(path.with_name("bus.db.damaged-1")) == damaged


@pytest.mark.parametrize("bit", [0, 7])
async def test_a_bit_that_is_flipped_within_a_record_costs_that_record(
    world: World, path: Path, caplog: pytest.LogCaptureFixture, bit: int
) -> None:
    spec = world.spec(partitions=1)
    (place,) = partitions(spec)
    values = [b"%d" % number * 5_000 for number in range(3)]
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
        await (await bus.producer()).publish([record(place, b"k", value) for value in values])
    whole = bytearray(content(path))
    whole[whole.index(values[1][:1_000]) + 500] ^= 1 << bit
    put(path, bytes(whole))

    async with EmbeddedBus(path) as bus:
        reader = await bus.reader({place: EARLIEST})
        assert [r.value for r in await collect(reader, 2)] == [values[0], values[2]]
        assert await reader.position(place) == 3
        await reader.seek(place, EARLIEST)
        await collect(reader, 2)
        await (await bus.producer()).publish([record(place, b"k", b"later")])
        assert [r.value for r in await collect(reader, 1)] == [b"later"]

    errors = [one.message for one in caplog.records if one.levelname == "ERROR"]
    assert len(errors) == 1
    assert f"record 1 of {spec.name} partition 0 is not what was written" in errors[0]


async def test_what_follows_a_damaged_record_is_read_whatever_the_size_of_a_poll(
    world: World, path: Path
) -> None:
    spec = world.spec(partitions=1)
    (place,) = partitions(spec)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
        await (await bus.producer()).publish([record(place, b"k", b"v")] * 20)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE records SET value = 'text \u00e9' WHERE id % 20 = 3")
        db.execute("UPDATE records SET append_ms = 'no time' WHERE id % 20 = 5")
        db.execute("UPDATE records SET checksum = checksum + 1 WHERE id % 20 = 7")

    async with EmbeddedBus(path) as bus:
        reader, found = await bus.reader({place: EARLIEST}), list[Record]()
        while await reader.position(place) < 20:
            found += await reader.poll(timeout_s=0.5, max_records=6)
    assert len(found) == 17


def corrupt() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorname = "SQLITE_CORRUPT"
    return error


async def test_damage_that_a_second_look_does_not_find_is_none(world: World, path: Path) -> None:
    spec = world.spec(partitions=1)
    (place,) = partitions(spec)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
        producer = await bus.producer()
        await producer.publish([record(place, b"k", b"first")])
        looks: list[int] = []

        def look(db: sqlite3.Connection) -> int:
            looks.append(db.execute("SELECT count(*) FROM records").fetchone()[0])
            if len(looks) == 1:
                raise corrupt()
            return looks[-1]

        connection = producer._connection
        assert await connection.run(look) == 1
        assert (looks, connection.epoch) == ([1, 1], 0)
        await producer.publish([record(place, b"k", b"second")])
        found = await collect(await bus.reader({place: EARLIEST}), 2)
    assert [r.value for r in found] == [b"first", b"second"]
    assert list(path.parent.glob("*.damaged-*")) == []


async def test_a_new_bus_has_the_topics_of_the_damaged_one_whoever_makes_it(
    world: World, path: Path
) -> None:
    spec = world.spec(partitions=1)
    (place,) = partitions(spec)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
    async with EmbeddedBus(path) as bus:
        producer = await bus.producer()
        await producer.publish([record(place, value=bytes(200_000))])
        db = sqlite3.connect(path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        at_the_head(path)
        inside(path)
        await producer.publish([record(place, b"k", b"later")])
        assert [r.value for r in await collect(await bus.reader({place: EARLIEST}), 1)] == [
            b"later"
        ]


@pytest.mark.parametrize("times", [1, 2])
async def test_damage_that_opening_meets_twice_is_set_aside(
    world: World, path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    spec = world.spec(partitions=1)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
    connect, looks = BusFile.connect, []

    def met(self: BusFile) -> sqlite3.Connection:
        looks.append(self.path)
        if len(looks) <= times:
            raise corrupt()
        return connect(self)

    monkeypatch.setattr(BusFile, "connect", met)
    async with EmbeddedBus(path) as bus:
        await bus.init([spec])
    assert path.with_name("bus.db.damaged-1").exists() == (times == 2)


async def test_a_disk_that_damages_every_file_is_not_filled_with_them(
    world: World, path: Path
) -> None:
    spec = world.spec()
    for nth in range(1, 4):
        async with EmbeddedBus(path) as bus:
            await bus.init([spec])
        at_the_head(path)
        async with EmbeddedBus(path):
            assert path.with_name(f"bus.db.damaged-{nth}").exists()
    at_the_head(path)

    with pytest.raises(UnusableBus, match=str(path)):
        async with EmbeddedBus(path):
            pass

    assert len(list(path.parent.glob("*.damaged-*"))) == 3


async def test_a_file_that_is_being_made_is_of_no_other_kind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody else makes it between two questions about it.
    put(path, b"")
    makers: list[threading.Thread] = []

    class Questions(sqlite3.Connection):
        def execute(self, text: str, *more: Any) -> sqlite3.Cursor:
            if text == "PRAGMA user_version" and not makers:
                makers.append(threading.Thread(target=lambda: BusFile(path).open().close()))
                makers[0].start()
                makers[0].join(0.5)
            return super().execute(text, *more)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Questions))
    async with EmbeddedBus(path) as bus:
        assert list(await bus.show([])) == []
    (maker,) = makers
    maker.join()
