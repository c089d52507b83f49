"""What a standby keeps of the states of others; a restore from it is one from the topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.rules.fold_service import FoldService
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, BusUnavailable, From, Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.standby import NewestRecords, Standby
from tocsin.runtime.whole_partitions import read_whole
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.engine.saved_states import SavedStates
from tocsin.stream_rules.service import build_rules_service

TOPICS = Topics()
PLACE = Partition(TOPICS.state, 7)
OTHER = Partition(TOPICS.state, 8)
MUCH = 1 << 30


def state(offset: int, key: bytes, value: bytes | None, place: Partition = PLACE) -> Record:
    return Record(place, offset, 0, key, value)


def by_length(record: Record) -> int:
    return len(record.value or b"")


def kept(newest: NewestRecords, place: Partition = PLACE) -> dict[bytes, list[int]]:
    """The offsets of what it has, by key."""
    offsets: dict[bytes, list[int]] = {}
    for record in newest.pop({place}).records(place):
        offsets.setdefault(record.key, []).append(record.offset)
    return offsets


def snapshot(rule: str, next_offset: int) -> bytes:
    return Snapshot(
        run_id="gpt",
        incarnation="1",
        rule=rule,
        rule_version=1,
        next_offset=next_offset,
        payload=b"",
    ).encode()


Written = tuple[str, int | None]
"""A rule and the `next_offset` of its state; None: a tombstone, below 0: no snapshot."""


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(-1, 9)), max_size=30),
    st.integers(0, 30),
)
def test_a_restore_from_a_standby_is_one_from_the_topic(written: list[Written], seen: int) -> None:
    records = [
        state(
            offset,
            f"gpt/{rule}".encode(),
            None if number is None else b"?" if number < 0 else snapshot(rule, number),
        )
        for offset, (rule, number) in enumerate(written)
    ]
    newest = NewestRecords(build_rules_service(TOPICS).order_of, limit_bytes=MUCH)
    newest.follow({PLACE})
    newest.add(records[:seen])
    ahead = newest.pop({PLACE})
    position = ahead.positions().get(PLACE, 0)

    whole, resumed = SavedStates(), SavedStates()
    for record in records:
        whole.apply(7, record)
    ahead.add(records[position:])
    for record in ahead.records(PLACE):
        resumed.apply(7, record)

    assert resumed.outlived(7, "gpt") == whole.outlived(7, "gpt")
    assert resumed.pop(7, "gpt") == whole.pop(7, "gpt")


def test_the_highest_order_counts_and_of_equals_the_last() -> None:
    newest = NewestRecords(by_length, limit_bytes=MUCH)
    newest.follow({PLACE})
    newest.add([state(0, b"a", b"222"), state(1, b"a", b"11"), state(2, b"b", b"1")])
    newest.add([state(5, b"b", b"2"), state(6, b"c", b"1"), state(7, b"c", None)])
    assert newest.starts() == {PLACE: From.offset(8)}
    assert kept(newest) == {b"a": [0, 1], b"b": [5]}, (
        "the last of a key, too, where it is not the newest"
    )
    assert newest.size_bytes == 0, "what was taken is kept no more"


def test_over_the_limit_the_largest_partition_is_left_out_whole() -> None:
    newest = NewestRecords(by_length, limit_bytes=4_000)
    newest.follow({PLACE, OTHER})
    assert not newest.add([state(0, b"a", bytes(1_000)), state(0, b"b", bytes(900), OTHER)])
    assert newest.add([state(1, b"c", bytes(1_000))]) == {PLACE}
    assert newest.partitions == {OTHER}
    newest.add([state(2, b"d", bytes(1_000))])
    assert PLACE not in newest.pop({PLACE}).positions(), "it is read from its beginning then"
    assert kept(newest, OTHER) == {b"b": [0]}


def test_what_is_replaced_makes_room() -> None:
    newest = NewestRecords(by_length, limit_bytes=4_000)
    newest.follow({PLACE})
    for offset in range(50):
        assert not newest.add([state(offset, b"a", bytes(1_000 + offset))])
    newest.add([state(50, b"a", None)])
    assert newest.size_bytes == 0


def test_a_log_that_starts_again_is_another_one() -> None:
    newest = NewestRecords(by_length, limit_bytes=MUCH)
    newest.follow({PLACE})
    newest.add([state(8, b"a", b"1"), state(9, b"b", b"1")])
    newest.add([state(0, b"c", b"1")])
    assert kept(newest) == {b"c": [0]}


def test_partitions_that_are_followed_no_more_are_dropped() -> None:
    newest = NewestRecords(by_length, limit_bytes=MUCH)
    newest.follow({PLACE, OTHER})
    newest.add([state(3, b"a", b"1"), state(4, b"a", b"1", OTHER)])
    newest.follow({OTHER})
    assert newest.starts() == {OTHER: From.offset(5)}
    newest.follow({PLACE, OTHER})
    assert newest.starts() == {PLACE: EARLIEST, OTHER: From.offset(5)}


# -- on a bus


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


async def write(bus: EmbeddedBus, values: Sequence[tuple[bytes, int]]) -> None:
    producer = await bus.producer()
    await producer.publish(
        [Outgoing(PLACE, key, b'{"next_offset": %d}' % offset) for key, offset in values]
    )
    await producer.close()


async def restored(bus: EmbeddedBus, ahead: Record) -> tuple[list[tuple[bytes, int]], int]:
    """Keys and offsets of all that a restore is given, and how much of it was read."""
    newest = NewestRecords(by_length, limit_bytes=MUCH)
    newest.follow({PLACE})
    newest.add([ahead])

    async def sink(records: Sequence[Record]) -> None:
        newest.add(records)

    done = await read_whole(bus, [PLACE], sink, positions=newest.positions())
    newest.drop_beyond(done.ends)
    return [(record.key, record.offset) for record in newest.records(PLACE)], done.read


async def test_a_restore_reads_what_a_standby_has_not(bus: EmbeddedBus) -> None:
    await write(bus, [(b"a", 1), (b"a", 2), (b"b", 3)])
    assert await restored(bus, state(1, b"a", b'{"next_offset": 2}')) == ([(b"a", 1), (b"b", 2)], 1)


async def test_a_standby_of_a_log_that_is_gone_counts_for_nothing(bus: EmbeddedBus) -> None:
    gone = state(90, b"z", b'{"next_offset": 2}')
    assert await restored(bus, gone) == ([], 0)
    await write(bus, [(b"a", 1)])
    assert await restored(bus, gone) == ([(b"a", 0)], 1)


def standby(bus: EmbeddedBus, owned: set[int], metrics: PrometheusMetrics, limit: int) -> Standby:
    return Standby(
        bus,
        FoldService(TOPICS),
        topics=TOPICS,
        owned=lambda: frozenset(owned),
        limit_bytes=limit,
        metrics=metrics,
    )


async def test_it_follows_what_others_own_and_survives_a_bus_that_is_away(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.runtime.standby._SETTLE_S", 0.01)
    monkeypatch.setattr("tocsin.runtime.standby._BACKOFF_S", 0.01)
    owned, metrics = {PLACE.number}, PrometheusMetrics()
    one = standby(bus, owned, metrics, MUCH)
    await write(bus, [(b"a", 1)])
    one.start()
    await until(lambda: one._reader is not None)
    assert not one.pop({PLACE}).positions(), "it is ours"

    owned.clear()
    await until(lambda: metrics.value(names.STANDBY_BYTES, service="fold") > 0)
    reader = one._reader
    assert reader is not None

    async def away(**_: object) -> Sequence[Record]:
        raise BusUnavailable("the broker is away")

    monkeypatch.setattr(reader, "poll", away)
    await until(lambda: one._reader not in (None, reader), what="another reader")
    await write(bus, [(b"a", 2), (b"b", 1)])
    await until(lambda: one._kept.starts()[PLACE] == From.offset(3))
    assert [record.offset for record in one.pop({PLACE}).records(PLACE)] == [1, 2]
    await one.close()


async def test_what_was_taken_for_a_take_over_that_failed_is_read_again(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.runtime.standby._SETTLE_S", 0.01)
    metrics = PrometheusMetrics()
    one = standby(bus, set(), metrics, MUCH)
    await write(bus, [(b"a", 1)])
    one.start()
    for _ in range(2):
        await until(lambda: metrics.value(names.STANDBY_BYTES, service="fold") > 0)
        assert one.pop({PLACE}).positions()
        assert metrics.value(names.STANDBY_BYTES, service="fold") == 0
    await one.close()


async def test_what_has_no_room_is_reported_and_not_read_again(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.runtime.standby._SETTLE_S", 0.01)
    metrics = PrometheusMetrics()
    one = standby(bus, set(), metrics, limit=1_000)
    await write(bus, [(b"key-%d" % number, number) for number in range(20)])
    one.start()
    await until(lambda: metrics.value(names.STANDBY_LEFT_OUT, service="fold") == 1)
    await until(lambda: one._reader is not None and PLACE not in one._kept.partitions)
    assert metrics.value(names.STANDBY_BYTES, service="fold") == 0
    assert not one.pop({PLACE}).positions()
    await one.close()


async def test_an_error_of_ours_ends_it_and_nothing_else(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tocsin.runtime.standby._SETTLE_S", 0.01)
    one = standby(bus, set(), PrometheusMetrics(), MUCH)
    producer = await bus.producer()
    await producer.publish([Outgoing(PLACE, b"a", b"no json")])
    await producer.close()
    one.start()
    assert one._task is not None
    await asyncio.wait({one._task}, timeout=20)
    assert one._task.done()
    assert one._reader is None
    assert "not standing by any more" in caplog.text
    assert not one.pop({PLACE}).positions()
    await one.close()
