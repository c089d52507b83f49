"""What every bus does, tried on the embedded one and on a real Kafka."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from support.buses import (
    Notes,
    World,
    all_values,
    assigned,
    collect,
    next_millisecond,
    partitions,
    record,
    until,
)
from support.waiting import SOON_S
from tocsin.bus.port import (
    EARLIEST,
    LATEST,
    Bus,
    BusClosed,
    FencedMember,
    From,
    Outgoing,
    Partition,
    Record,
    UnknownTopic,
)
from tocsin.schemas.errors import RecordTooLarge
from tocsin.schemas.topics import MAX_RECORD_BYTES, Topics


async def test_init_creates_the_seven_topics_as_they_should_be(world: World, bus: Bus) -> None:
    specs = Topics(world.prefix).specs()

    before = await bus.show(specs)
    after = await bus.init(specs)

    assert [state.exists for state in before] == [False] * 7
    assert [(state.spec, state.exists, state.records, state.differs) for state in after] == [
        (spec, True, 0, ()) for spec in specs
    ]


async def test_init_changes_nothing_and_show_says_what_differs(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    other = replace(spec, partitions=8, retention_ms=1_000)

    (state,) = await bus.init([other])

    assert state.exists
    assert any("partitions" in text and "4" in text and "8" in text for text in state.differs)
    assert any("3600000" in text and "1000" in text for text in state.differs)
    assert (await bus.show([spec]))[0].differs == ()


async def test_records_come_back_whole_and_in_order(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 2)
    producer = await bus.producer()
    sent = [
        Outgoing(place, b"key %d" % (n % 3), b"value %d" % n, (("a", b"%d" % n), ("b", b"")))
        for n in range(50)
    ]
    began_ms = time.time_ns() // 1_000_000

    offsets = [*await producer.publish(sent[:20]), *await producer.publish(sent[20:])]

    assert offsets == list(range(50))
    records = await collect(await bus.reader({place: EARLIEST}), 50)
    assert [(r.partition, r.offset, r.key, r.value, r.headers) for r in records] == [
        (place, n, out.key, out.value, out.headers) for n, out in enumerate(sent)
    ]
    assert records[7].header("a") == b"7"
    assert records[7].header("c") is None
    times = [r.append_ms for r in records]
    assert times == sorted(times)
    assert began_ms - 1_000 <= times[0] <= began_ms + 20_000
    assert (await bus.show([spec]))[0].records == 50


async def test_publish_returns_offsets_in_the_order_of_the_records(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    producer = await bus.producer()
    sent = [record(Partition(spec.name, number % 3)) for number in range(9)]

    assert await producer.publish([]) in ((), [])
    assert list(await producer.publish(sent)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


async def test_partitions_of_two_topics_align(world: World, bus: Bus) -> None:
    left, right = world.spec(), world.spec("compact")
    await bus.init([left, right])
    producer = await bus.producer()
    for number in range(4):
        await producer.publish(
            [record(Partition(topic.name, number), b"run %d" % number) for topic in (left, right)]
        )

    for number in range(4):
        places = (Partition(left.name, number), Partition(right.name, number))
        records = await collect(await bus.reader(dict.fromkeys(places, EARLIEST)), 2)
        assert {(r.partition, r.key) for r in records} == {
            (place, b"run %d" % number) for place in places
        }


async def test_an_acknowledged_record_survives_sigkill_of_its_producer(
    world: World, bus: Bus
) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)

    child = world.child("publish", spec.name, "5")
    said, _ = child.communicate(timeout=30)

    assert child.returncode == -signal.SIGKILL
    assert said.split() == ["0", "1", "2", "3", "4"]
    assert await all_values(bus, place) == {b"k": [b"0", b"1", b"2", b"3", b"4"]}


async def test_two_consumers_share_and_one_takes_over_when_the_other_dies(
    world: World, bus: Bus
) -> None:
    spec = world.spec()
    await bus.init([spec])
    notes = Notes()
    consumer = await bus.consumer("share", [spec.name], listener=notes)
    await assigned(consumer, 4)
    assert notes.assigned == [frozenset(partitions(spec))]

    child = world.child("consume", "share", spec.name)
    try:
        await assigned(consumer, 2)
        assert notes.revoked
        assert len(notes.assigned) > 1, "told what comes back, be it nothing"
        producer = await bus.producer()
        await producer.publish(
            [record(place, b"k", b"%d" % place.number) for place in partitions(spec)]
        )
        mine = await collect(consumer, 2)
        assert {r.partition for r in mine} == consumer.assigned()
        await consumer.commit({r.partition: r.offset + 1 for r in mine})
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()

    others = await collect(consumer, 2)
    assert {r.partition for r in mine} | {r.partition for r in others} == set(partitions(spec))
    assert len(consumer.assigned()) == 4


async def test_a_revoked_partition_can_be_committed_a_last_time(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    producer = await bus.producer()
    await producer.publish([record(place) for place in partitions(spec)])
    notes = Notes()
    first = await bus.consumer("last", [spec.name], listener=notes)
    await collect(first, 4)

    async def commit(revoked: frozenset[Partition]) -> None:
        await first.commit(dict.fromkeys(revoked, 1))

    notes.when_revoked = commit
    second = await bus.consumer("last", [spec.name])
    seen: list[Record] = []

    async def shared() -> bool:
        await first.poll(timeout_s=0.05)
        seen.extend(await second.poll(timeout_s=0.05))
        return len(first.assigned()) == 2 and len(second.assigned()) == 2

    await until(shared, "two partitions each")
    assert seen == []
    assert first.assigned().isdisjoint(second.assigned())
    assert [await second.position(place) for place in sorted(second.assigned())] == [1, 1]


async def test_a_member_commits_and_the_next_one_resumes_there(world: World, bus: Bus) -> None:
    spec = world.spec(partitions=1)
    await bus.init([spec])
    (place,) = partitions(spec)
    await (await bus.producer()).publish([record(place, b"k", b"%d" % n) for n in range(5)])

    first = await bus.consumer("resume", [spec.name])
    assert await first.committed(place) is None
    assert [r.offset for r in await collect(first, 5)] == [0, 1, 2, 3, 4]
    await first.commit({place: 3})
    assert await first.committed(place) == 3
    await first.close()

    second = await bus.consumer("resume", [spec.name])
    assert [r.offset for r in await collect(second, 2)] == [3, 4]
    other = await bus.consumer("other", [spec.name])
    assert [r.offset for r in await collect(other, 5)] == [0, 1, 2, 3, 4]


async def test_only_takes_the_partitions_without_membership(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    one, two = Partition(spec.name, 1), Partition(spec.name, 2)
    await (await bus.producer()).publish([record(one), record(one), record(two)])

    consumer = await bus.consumer("only", [spec.name], only=[one])
    assert consumer.assigned() == {one}
    assert [r.partition for r in await collect(consumer, 2)] == [one, one]
    await consumer.commit({one: 1})
    await consumer.close()

    again = await bus.consumer("only", [spec.name], only=[one])
    assert [r.offset for r in await collect(again, 1)] == [1]


async def test_a_commit_of_what_is_not_owned_is_fenced(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    first = await bus.consumer("fence", [spec.name])
    await assigned(first, 4)
    second = await bus.consumer("fence", [spec.name])

    async def shared() -> bool:
        await first.poll(timeout_s=0.05)
        await second.poll(timeout_s=0.05)
        return len(first.assigned()) == len(second.assigned()) == 2

    await until(shared, "two partitions each")
    (lost, *_) = sorted(second.assigned())
    with pytest.raises(FencedMember):
        await first.commit({lost: 1})


async def test_a_listener_may_seek_before_anything_is_read(world: World, bus: Bus) -> None:
    spec = world.spec(partitions=2)
    await bus.init([spec])
    places = partitions(spec)
    await (await bus.producer()).publish([record(place) for place in places for _ in range(4)])
    notes = Notes()
    consumer = await bus.consumer("seek", [spec.name], listener=notes)

    async def skip(gained: frozenset[Partition]) -> None:
        for place in gained:
            assert place in consumer.assigned()
            await consumer.seek(place, From.offset(3))

    notes.when_assigned = skip
    records = await collect(consumer, 2)
    assert sorted((r.partition.number, r.offset) for r in records) == [(0, 3), (1, 3)]


async def test_other_tasks_go_on_while_all_is_read(world: World, bus: Bus) -> None:
    """A worker that restores reads for seconds on the loop that sends its group's heartbeats."""
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    await (await bus.producer()).publish([record(place) for _ in range(2_000)])
    reader = await bus.reader({place: EARLIEST})
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    without_a_turn = 0
    while await reader.position(place) < 2_000:
        before = turns
        await reader.poll(timeout_s=SOON_S, max_records=10)
        without_a_turn += turns == before
    task.cancel()

    assert without_a_turn == 0


async def test_position_end_and_lag(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    place, empty = Partition(spec.name, 0), Partition(spec.name, 1)
    await (await bus.producer()).publish([record(place) for _ in range(7)])
    reader = await bus.reader({place: From.offset(2), empty: EARLIEST})

    assert await reader.position(place) == 2
    assert await reader.ends([place, empty]) == {place: 7, empty: 0}
    assert len(await reader.poll(timeout_s=5, max_records=3)) == 3
    assert await reader.position(place) == 5
    await collect(reader, 2)
    assert (await reader.ends([place]))[place] - await reader.position(place) == 0


async def test_a_reader_begins_at_either_end_and_seeks(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    await producer.publish([record(place) for _ in range(3)])

    reader = await bus.reader({place: LATEST})
    assert await reader.poll(timeout_s=0) in ((), [])
    await producer.publish([record(place)])
    assert [r.offset for r in await collect(reader, 1)] == [3]
    await reader.seek(place, EARLIEST)
    assert [r.offset for r in await collect(reader, 4)] == [0, 1, 2, 3]
    await reader.seek(place, LATEST)
    assert await reader.position(place) == 4
    with pytest.raises(ValueError, match="does not read"):
        await reader.seek(Partition(spec.name, 1), EARLIEST)


async def test_replay_from_a_time(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    reader = await bus.reader({place: EARLIEST})
    times: list[int] = []
    for _ in range(6):
        await producer.publish([record(place)])
        times.append((await collect(reader, 1))[0].append_ms)
        await next_millisecond()
    assert times == sorted(set(times))

    for offset in (0, 2, 5):
        replay = await bus.reader({place: From.time(times[offset])})
        assert [r.offset for r in await collect(replay, 6 - offset)] == list(range(offset, 6))
        await replay.seek(place, From.time(times[offset] - 1))
        assert await replay.position(place) in (offset, offset - 1)
        await replay.close()
    late = await bus.reader({place: From.time(times[-1] + 1)})
    assert await late.position(place) == 6


async def test_compaction_keeps_the_newest_of_each_key(world: World, bus: Bus) -> None:
    spec = world.spec("compact", tombstone_ms=3_600_000)
    await bus.init([spec])
    await world.tighten(spec)
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    for number in range(4):
        await producer.publish([record(place, key, b"%d" % number) for key in (b"a", b"b")])
    await producer.publish([record(place, b"b", b"last")])

    async def compacted() -> bool:
        await world.compact(bus, spec)
        found = await all_values(bus, place)
        assert found[b"a"][-1] == b"3"
        assert found[b"b"][-1] == b"last"
        return len(found[b"a"]) == len(found[b"b"]) == 1

    await until(compacted, "one record per key")
    reader = await bus.reader({place: EARLIEST})
    end = (await reader.ends([place]))[place]
    assert end >= 9
    found = await collect(reader, 2)
    assert [r.offset for r in found[:2]] == [6, 8]


async def test_a_tombstone_takes_its_key_away(world: World, bus: Bus) -> None:
    spec = world.spec("compact", tombstone_ms=1)
    await bus.init([spec])
    await world.tighten(spec)
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    await producer.publish([record(place, b"gone", b"1"), record(place, b"stays", b"2")])
    await producer.publish([record(place, b"gone", None)])
    assert await all_values(bus, place) == {b"gone": [b"1", None], b"stays": [b"2"]}

    async def gone() -> bool:
        await world.compact(bus, spec)
        found = await all_values(bus, place)
        assert found[b"stays"] == [b"2"]
        return b"gone" not in found

    await until(gone, "the key and its tombstone are gone")


async def test_retention_drops_the_oldest_and_readers_go_on(world: World, bus: Bus) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    for _ in range(6):
        await producer.publish([record(place)])
        await next_millisecond()

    await world.expire(bus, place, 4)

    behind = await bus.reader({place: From.offset(1)})
    assert [r.offset for r in await collect(behind, 2)] == [4, 5]
    assert await (await bus.reader({place: EARLIEST})).position(place) == 4
    assert (await behind.ends([place]))[place] == 6
    assert list(await producer.publish([record(place)])) == [6]


async def test_a_record_of_one_mebibyte_passes_and_a_larger_one_is_refused(
    world: World, bus: Bus
) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    large = os.urandom(1024 * 1024)
    largest = os.urandom(MAX_RECORD_BYTES - 1024)

    await producer.publish([record(place, b"k", large), record(place, b"k", largest)])
    with pytest.raises(RecordTooLarge) as caught:
        await producer.publish([record(place), record(place, b"k", bytes(MAX_RECORD_BYTES + 1))])

    assert caught.value.limit_bytes == MAX_RECORD_BYTES
    assert await all_values(bus, place) == {b"k": [large, largest]}


async def test_an_unknown_topic_is_named_and_not_created(world: World, bus: Bus) -> None:
    spec = world.spec()
    place = Partition(spec.name, 0)
    producer = await bus.producer()

    with pytest.raises(UnknownTopic, match=spec.name):
        await producer.publish([record(place)])
    with pytest.raises(UnknownTopic, match=spec.name):
        await bus.reader({place: EARLIEST})
    with pytest.raises(UnknownTopic, match=spec.name):
        await bus.consumer("unknown", [spec.name], only=[place])
    consumer = await bus.consumer("unknown", [spec.name])
    assert await consumer.poll(timeout_s=0.05) in ((), [])
    assert not (await bus.show([spec]))[0].exists

    await bus.init([spec])
    with pytest.raises(UnknownTopic, match="0 to 3"):
        await bus.reader({Partition(spec.name, 4): EARLIEST})
    with pytest.raises(UnknownTopic, match="0 to 3"):
        await producer.publish([record(Partition(spec.name, 4))])


async def test_a_consumer_finds_a_topic_that_is_created_late(world: World, bus: Bus) -> None:
    early, late = world.spec(), world.spec()
    await bus.init([early])
    consumer = await bus.consumer("late", [early.name, late.name])
    await assigned(consumer, 4)

    await bus.init([late])
    await (await bus.producer()).publish([record(Partition(late.name, 1))])

    assert (await collect(consumer, 1))[0].partition == Partition(late.name, 1)
    assert len(consumer.assigned()) == 8


async def test_poll_returns_as_soon_as_there_is_one_and_in_time_when_there_is_none(
    world: World, bus: Bus
) -> None:
    spec = world.spec()
    await bus.init([spec])
    place = Partition(spec.name, 0)
    producer = await bus.producer()
    await producer.publish([record(place)])
    reader = await bus.reader({place: EARLIEST})

    began = time.monotonic()
    assert len(await reader.poll(timeout_s=4 * SOON_S)) == 1
    assert time.monotonic() - began < SOON_S
    began = time.monotonic()
    assert await reader.poll(timeout_s=0.1) in ((), [])
    assert 0.09 <= time.monotonic() - began < SOON_S


async def test_what_was_closed_says_so(world: World) -> None:
    spec = world.spec()
    place = Partition(spec.name, 0)
    bus = world.bus()
    with pytest.raises(BusClosed):
        await bus.producer()
    async with bus:
        await bus.init([spec])
        producer = await bus.producer()
        reader = await bus.reader({place: EARLIEST})
        consumer = await bus.consumer("closed", [spec.name])
        other = await bus.producer()
        await other.close()
        with pytest.raises(BusClosed):
            await other.publish([record(place)])
        await producer.publish([record(place)])
        began = time.monotonic()
    assert time.monotonic() - began < SOON_S
    for refused in (
        producer.publish([record(place)]),
        reader.poll(timeout_s=0),
        consumer.poll(timeout_s=0),
        consumer.commit({place: 1}),
        bus.show([spec]),
        bus.producer(),
        bus.lease("name"),
    ):
        with pytest.raises(BusClosed):
            await refused
    await producer.close()
    await reader.close()
