from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from support.records.on_bus import read_all
from support.rules.fold_service import FoldService, expected_outputs
from support.waiting import SOON_S, until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.reader import EmbeddedConsumer, EmbeddedReader
from tocsin.bus.port import (
    Bus,
    BusUnavailable,
    FencedMember,
    From,
    Outgoing,
    Partition,
    Record,
    record_size,
)
from tocsin.runtime import bus_io
from tocsin.runtime import metrics as names
from tocsin.runtime.bus_clock import SETTLING_MS
from tocsin.runtime.dead_letters import DeadLetterLimits, TooManyDeadLetters
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.service import Poison, Tick
from tocsin.runtime.testing import FakeClock
from tocsin.runtime.unacknowledged import Unacknowledged
from tocsin.runtime.watchdog import CHECK_INTERVAL_MS, STUCK_MS, WedgedConsumer
from tocsin.runtime.whole_partitions import Restored, read_whole
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.topics import (
    DLQ_PARTITIONS,
    MAX_RECORD_BYTES,
    Topics,
    partition_for,
    telemetry_partition,
)

TOPICS = Topics()
QUICK = WorkerSettings(checkpoint_s=0.02, poll_records=50)


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


async def send(bus: Bus, run: str, values: Sequence[bytes]) -> None:
    producer = await bus.producer()
    where = Partition(TOPICS.telemetry, telemetry_partition(run))
    await producer.publish([Outgoing(where, run.encode(), value) for value in values])
    await producer.close()


def numbers(*values: int) -> list[bytes]:
    return [b"%d" % value for value in values]


async def outputs_of(bus: Bus, run: str) -> list[tuple[str, int]]:
    records = await read_all(bus, TOPICS.issues, telemetry_partition(run) % 12)
    rows = [json.loads(record.value or b"") for record in records if record.key == run.encode()]
    return [(row["id"], row["state"]) for row in rows]


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        await asyncio.wait({task})


def make(bus: Bus, service: FoldService, **more: object) -> Worker:
    arguments: dict[str, object] = {"topics": TOPICS, "group": "g", "settings": QUICK, **more}
    return Worker(bus, service, **arguments)  # type: ignore[arg-type]


async def test_outputs_and_state_follow_from_the_input_alone(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", numbers(*range(30)))
    worker = make(bus, FoldService(TOPICS))

    async with running(worker):
        assert await worker.caught_up(10)
        await send(bus, "run-1", numbers(*range(30, 60)))
        assert await worker.caught_up(10)

    assert dict(await outputs_of(bus, "run-1")) == expected_outputs("run-1", range(60))
    assert len(await outputs_of(bus, "run-1")) == 60 // 7


async def test_who_gives_partitions_to_another_does_not_wait_for_them(bus: EmbeddedBus) -> None:
    runs = [f"run-{number}" for number in range(8)]
    assert {telemetry_partition(run) % 2 for run in runs} == {0, 1}
    for run in runs:
        await send(bus, run, numbers(*range(200)))
    first, second = (make(bus, FoldService(TOPICS)) for _ in range(2))
    async with running(first):
        waiting = asyncio.create_task(first.caught_up(20))
        await first.ready.wait()
        async with running(second):
            assert await waiting
            assert await second.caught_up(20)
    for run in runs:
        assert dict(await outputs_of(bus, run)) == expected_outputs(run, range(200))


async def test_goes_on_from_the_snapshot_after_a_restart(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", numbers(*range(10)))
    first = make(bus, FoldService(TOPICS))
    async with running(first):
        assert await first.caught_up(10)

    await send(bus, "run-1", numbers(*range(10, 20)))
    service = FoldService(TOPICS)
    second = make(bus, service)
    async with running(second):
        assert await second.caught_up(10)

    assert service.applied == 10
    assert (telemetry_partition("run-1"), 10) in service.restored_at
    assert await outputs_of(bus, "run-1") == list(expected_outputs("run-1", range(20)).items())


async def test_records_that_retention_has_removed_are_not_waited_for(
    bus: EmbeddedBus, tmp_path: Path
) -> None:
    await send(bus, "run-1", numbers(1, 2, 3))
    with closing(sqlite3.connect(tmp_path / "bus.db")) as db, db:
        db.execute("DELETE FROM records")
    clock = FakeClock()
    worker = make(bus, FoldService(TOPICS), clock=clock)
    async with running(worker) as task:
        await worker.ready.wait()
        for _ in range(2 + STUCK_MS // CHECK_INTERVAL_MS):
            clock.advance(ms=CHECK_INTERVAL_MS)
            worker.nudge()
            await until(lambda: task.done() or worker.last_round_ms == clock.now_ms())
        assert not task.done(), task.exception()


async def test_where_a_poll_began_counts_once_it_has_returned(bus: EmbeddedBus) -> None:
    # It may return what an earlier poll, which was cancelled, has fetched.
    place = Partition(TOPICS.telemetry, 3)
    wiring = make(bus, FoldService(TOPICS))._wiring
    await wiring.join()
    assert wiring.consumer is not None
    wiring._checked = {place: 9}
    assert not wiring.checked_positions()
    await wiring._stop_poll("input")
    assert wiring.checked_positions() == {place: 9}
    assert not wiring.checked_positions()
    wiring.check_positions({place})
    wiring.drop({place})
    await wiring.join()
    await wiring._stop_poll("input")
    assert not wiring.checked_positions()
    await wiring.close()


async def test_after_an_absence_in_which_all_has_expired_a_worker_has_caught_up(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.runtime.bus_clock.SETTLING_MS", 1_000)
    await send(bus, "run-1", numbers(1, 2, 3))
    async with running(first := make(bus, FoldService(TOPICS))):
        assert await first.caught_up(10)
    await send(bus, "run-1", numbers(4, 5))
    await send(bus, "run-2", numbers(1))
    await bus.maintain(1_000, time.time_ns() // 1_000_000 + 90_000_000)

    service = FoldService(TOPICS)
    service.due_ms = 1
    async with running(worker := make(bus, service)):
        assert await worker.caught_up(10)
        await until(lambda: service.due_ms is None, what="a timer fires")
        await send(bus, "run-1", numbers(6))
        await until(lambda: service.applied == 1)


async def looks(worker: Worker, task: asyncio.Task[None], clock: FakeClock, times: int) -> None:
    """Let that many looks at the ends come due, with polls between them."""
    for _ in range(times):
        clock.advance(ms=CHECK_INTERVAL_MS)
        worker.nudge()
        await until(lambda: task.done() or worker.last_round_ms == clock.now_ms(), SOON_S)
        await asyncio.sleep(0.05)


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.runtime.bus_io._POLL_S", 0.01)


@pytest.mark.usefixtures("short_polls")
async def test_a_consumer_that_returns_nothing_ends_the_worker(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: EmbeddedConsumer, max_records: int) -> Sequence[Record]:
        return ()

    clock = FakeClock()
    worker = make(bus, FoldService(TOPICS), clock=clock)
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    monkeypatch.setattr(EmbeddedConsumer, "_fetch", nothing)
    await send(bus, "run-1", numbers(1, 2, 3))
    await looks(worker, task, clock, 2 + STUCK_MS // CHECK_INTERVAL_MS)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(WedgedConsumer, match="no records of"):
            await task


@pytest.mark.usefixtures("short_polls")
async def test_a_partition_that_returns_nothing_ends_the_worker_while_others_are_read(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Partition(TOPICS.telemetry, telemetry_partition("run-1"))
    assert telemetry_partition("run-2") != stuck.number
    read = EmbeddedReader._fetch

    async def all_but_one(self: EmbeddedReader, max_records: int) -> Sequence[Record]:
        held = self._positions.pop(stuck, None)
        try:
            return await read(self, max_records)
        finally:
            if held is not None:
                self._positions[stuck] = held

    clock, metrics, service = FakeClock(), PrometheusMetrics(), FoldService(TOPICS)
    worker = make(bus, service, clock=clock, metrics=metrics)
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    monkeypatch.setattr(EmbeddedReader, "_fetch", all_but_one)
    await send(bus, "run-1", numbers(1, 2, 3))
    for number in range(2 + STUCK_MS // CHECK_INTERVAL_MS):
        await send(bus, "run-2", numbers(number))
        await until(lambda: service.applied > number or task.done(), SOON_S)  # noqa: B023
        await looks(worker, task, clock, 1)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(WedgedConsumer, match=f"partition {stuck.number} "):
            await task
    assert metrics.value(names.LAG, service="fold") == 3


@pytest.mark.usefixtures("short_polls")
async def test_a_partition_that_waits_for_its_turn_does_not_end_the_worker(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, offsets = Partition(TOPICS.telemetry, telemetry_partition("run-2")), itertools.count()

    async def others(self: EmbeddedReader, max_records: int) -> Sequence[Record]:
        await asyncio.sleep(0.001)
        self._bell.touch()  # there is more
        return [Record(busy, next(offsets), 0, b"run-2", b"1") for _ in range(max_records)]

    clock = FakeClock()
    worker = make(bus, FoldService(TOPICS), clock=clock)
    async with running(worker) as task:
        await worker.ready.wait()
        monkeypatch.setattr(EmbeddedReader, "_fetch", others)
        await send(bus, "run-1", numbers(1, 2, 3))
        await looks(worker, task, clock, 2 + STUCK_MS // CHECK_INTERVAL_MS)
        assert not task.done()


@pytest.mark.usefixtures("short_polls")
async def test_a_poll_that_is_full_of_bytes_has_not_returned_all(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, offsets = Partition(TOPICS.telemetry, telemetry_partition("run-2")), itertools.count()
    monkeypatch.setattr(bus_io, "MAX_POLL_BYTES", 100)

    async def large(self: EmbeddedReader, max_records: int) -> Sequence[Record]:
        await asyncio.sleep(0.001)
        self._bell.touch()  # there is more
        return [Record(busy, next(offsets), 0, b"run-2", bytes(100))]

    clock = FakeClock()
    worker = make(bus, Passive(TOPICS), clock=clock)
    async with running(worker) as task:
        await worker.ready.wait()
        monkeypatch.setattr(EmbeddedReader, "_fetch", large)
        await send(bus, "run-1", numbers(1, 2, 3))
        await looks(worker, task, clock, 2 + STUCK_MS // CHECK_INTERVAL_MS)
        assert not task.done()


class Passive(FoldService):
    """Takes in whatever comes."""

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        return ()


class Hanging(FoldService):
    """Hangs over the first records that it is given, until `free` is set."""

    free = threading.Event()
    hangs = False

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        if records:
            self.hangs = not self.free.is_set()
            self.free.wait(60)
        return super().apply(records, tick)


async def test_a_service_that_hangs_ends_no_round(bus: EmbeddedBus) -> None:
    clock, service = FakeClock(1000), Hanging(TOPICS)
    worker = make(bus, service, clock=clock)
    assert worker.last_round_ms is None
    async with running(worker):
        await until(lambda: worker.last_round_ms == 1000, what="the first round")
        await send(bus, "run-1", numbers(*range(10)))
        worker.nudge()
        await until(worker._lock.locked, what="a round with records")
        clock.advance(s=300)
        await asyncio.sleep(0.05)
        assert worker.last_round_ms == 1000
        service.free.set()
        await until(lambda: worker.last_round_ms == 301_000, what="the end of the round")


class Growing(FoldService):
    """Its snapshots are over the limit of the bus while `big`."""

    big = True

    def snapshots(self, *, force: bool) -> Sequence[Outgoing]:
        found = super().snapshots(force=force)
        pad = b" " * MAX_RECORD_BYTES if self.big else b""
        return [Outgoing(one.partition, one.key, (one.value or b"") + pad) for one in found]


async def test_what_a_snapshot_over_the_limit_holds_is_read_again_after_a_restart(
    bus: EmbeddedBus,
) -> None:
    await send(bus, "run-1", numbers(*range(10)))
    first = make(bus, Growing(TOPICS))
    async with running(first):
        assert await first.caught_up(10)

    service = Growing(TOPICS)
    second = make(bus, service)
    async with running(second):
        assert await second.caught_up(10)
        assert service.applied == 10
        service.big = False
        await send(bus, "run-1", numbers(*range(10, 20)))
        assert await second.caught_up(10)

    third = FoldService(TOPICS)
    worker = make(bus, third)
    async with running(worker):
        assert await worker.caught_up(10)
    assert third.applied == 0, "it fitted again, so the offset was committed"
    assert dict(await outputs_of(bus, "run-1")) == expected_outputs("run-1", range(20))


async def test_a_record_that_only_just_does_not_fit_is_left_out_rather_than_refused(
    bus: EmbeddedBus,
) -> None:
    metrics = PrometheusMetrics()
    unacknowledged = Unacknowledged("fold", metrics)
    place = Partition(TOPICS.issues, 0)
    room = MAX_RECORD_BYTES - record_size(Outgoing(place, b"run-1", b""))
    unacknowledged.add([Outgoing(place, b"run-1", bytes(size)) for size in (room, room + 1)])
    producer = await bus.producer()
    await unacknowledged.flush(producer)
    await producer.close()
    assert metrics.value(names.OVERSIZE, service="fold") == 1


async def test_rounds_and_the_lag_behind_the_bus_are_timed(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", numbers(*range(10)))
    clock = FakeClock(int(time.time() * 1000) + 60_000)
    metrics = PrometheusMetrics()
    worker = make(bus, FoldService(TOPICS), clock=clock, metrics=metrics)

    async with running(worker):
        assert await worker.caught_up(10)

    def sample(name: str, **more: str) -> float:
        return metrics.value(name, service="fold", **more)

    assert sample(f"{names.BUS_LAG}_bucket", le="30.0") == 0
    assert sample(f"{names.BUS_LAG}_bucket", le="300.0") == 1, "one poll, a minute old"
    assert sample(f"{names.ROUND}_count") >= 1
    assert sample(f"{names.ROUND}_sum") == pytest.approx(sample(names.APPLY_SECONDS))


async def test_a_worker_whose_clock_is_behind_the_bus_has_no_lag(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", numbers(1))
    clock = FakeClock(int(time.time() * 1000) - 60_000)
    metrics = PrometheusMetrics()
    worker = make(bus, FoldService(TOPICS), clock=clock, metrics=metrics)

    async with running(worker):
        assert await worker.caught_up(10)

    assert metrics.value(f"{names.BUS_LAG}_count", service="fold") == 1
    assert metrics.value(f"{names.BUS_LAG}_sum", service="fold") == 0


async def test_a_worker_that_is_ahead_of_the_bus_says_how_far_it_has_read_in_its_time(
    bus: EmbeddedBus,
) -> None:
    await send(bus, "run-1", numbers(0))
    now_ms = int(time.time() * 1000)
    service = FoldService(TOPICS)
    worker = make(bus, service, clock=FakeClock(now_ms + 60_000))

    async with running(worker):
        assert await worker.caught_up(10)
        service.due_ms = now_ms - 1_000
        worker.nudge()
        number = telemetry_partition("run-1")
        await until(lambda: any(number in tick.caught_up for tick in service.ticks))

    said = [tick.caught_up[number] for tick in service.ticks if number in tick.caught_up]
    assert all(fact.as_of_ms < now_ms + 50_000 for fact in said)


async def test_timers_in_the_worker_s_time_do_not_wait_for_that_of_the_bus(
    bus: EmbeddedBus,
) -> None:
    # A delivery is to be tried again; the issue before it lay on the bus for an hour.
    class Retries(FoldService):
        bus_time = False

    await send(bus, "run-1", numbers(0))
    service, clock = Retries(TOPICS), FakeClock(int(time.time() * 1000) + 3_600_000)
    async with running(worker := make(bus, service, clock=clock)):
        assert await worker.caught_up(10)
        service.due_ms = clock.now_ms()
        worker.nudge()
        await until(lambda: service.due_ms is None, SOON_S)


async def test_only_runs_leaves_the_records_of_others(bus: EmbeddedBus) -> None:
    run = "run-1"
    other = next(
        f"other-{i}"
        for i in range(1000)
        if telemetry_partition(f"other-{i}") == telemetry_partition(run)
    )
    await send(bus, other, numbers(*range(9)))
    await send(bus, run, numbers(*range(9)))
    service = FoldService(TOPICS)
    worker = make(bus, service, only_runs=[run])

    async with running(worker):
        assert await worker.caught_up(10)

    assert service.applied == 9
    assert await outputs_of(bus, other) == []


async def test_begins_where_it_is_told_if_nothing_was_committed(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", numbers(*range(5)))
    where = Partition(TOPICS.telemetry, telemetry_partition("run-1"))
    service = FoldService(TOPICS)
    worker = make(bus, service, only_runs=["run-1"], start=From.offset(3))

    async with running(worker):
        assert await worker.caught_up(10)

    assert service.applied == 2
    assert where.number in service.partitions


async def test_poison_goes_to_the_dead_letters_before_the_offset_moves(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", [*numbers(*range(5)), b"poison", *numbers(*range(5, 10))])
    service = FoldService(TOPICS)
    metrics = PrometheusMetrics()
    worker = make(bus, service, metrics=metrics)

    async with running(worker):
        assert await worker.caught_up(10)

    letters = await read_all(bus, TOPICS.dlq, partition_for(b"run-1", DLQ_PARTITIONS))
    assert [letter.value for letter in letters] == [b"poison"]
    why = DeadLetter.read(letters[0].headers)
    assert (why.topic, why.offset, why.error) == (TOPICS.telemetry, 5, "MalformedRecord")
    assert service.applied == 10
    assert metrics.value(names.DEAD_LETTERS, service="fold") == 1


async def test_a_flood_of_poison_stops_the_worker(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", [b"poison"] * 60)
    settings = WorkerSettings(poll_records=10, dead_letters=DeadLetterLimits(consecutive=20))
    worker = make(bus, FoldService(TOPICS), settings=settings)

    with pytest.raises(TooManyDeadLetters, match="20 records in a row"):
        await worker.run()

    letters = await read_all(bus, TOPICS.dlq, partition_for(b"run-1", DLQ_PARTITIONS))
    assert len(letters) < 20


async def test_two_members_share_and_one_takes_over_with_the_state(bus: EmbeddedBus) -> None:
    runs = [f"run-{i}" for i in range(12)]
    for run in runs:
        await send(bus, run, numbers(*range(10)))
    services = FoldService(TOPICS), FoldService(TOPICS)
    first, second = (make(bus, service) for service in services)

    async with running(first):
        async with running(second):
            await until(lambda: len(services[0].partitions) < 48 > len(services[1].partitions))
            await until(lambda: bool(services[1].partitions))
            for run in runs:
                await send(bus, run, numbers(*range(10, 20)))
            await until(lambda: sum(s.applied for s in services) >= 20 * len(runs))
        await until(lambda: len(services[0].partitions) == 48, 20)
        for run in runs:
            await send(bus, run, numbers(*range(20, 30)))
        assert await first.caught_up(10)

    for run in runs:
        found = await outputs_of(bus, run)
        assert dict(found) == expected_outputs(run, range(30))
        assert set(found) == set(expected_outputs(run, range(30)).items())


@pytest.mark.parametrize("written", [False, True])
async def test_a_partition_that_comes_back_is_restored_again_if_its_states_were_written_meanwhile(
    bus: EmbeddedBus, written: bool
) -> None:
    await send(bus, "run-1", numbers(*range(10)))
    number, service = telemetry_partition("run-1"), FoldService(TOPICS)
    place = frozenset({Partition(TOPICS.telemetry, number)})
    async with running(worker := make(bus, service)):
        assert await worker.caught_up(10)
        await worker.on_revoked(place)
        if written:
            # A timer of a silent run moves no offset, and leaves a state.
            state = json.dumps({"next_offset": 10, "state": 5, "count": 10}).encode()
            producer = await bus.producer()
            await producer.publish([Outgoing(Partition(TOPICS.state, number), b"run-1/f", state)])
            await producer.close()
        await worker.on_assigned(place)
        held = service.partitions[number]["run-1"].state

    assert len([one for one in service.restored_at if one[0] == number]) == 1 + written
    assert (held == 5) == written


async def test_timers_go_on_while_another_partition_is_read_and_nothing_of_it_is_there_yet(
    bus: EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FoldService(TOPICS)
    stays, comes = (Partition(TOPICS.telemetry, telemetry_partition(f"run-{n}")) for n in (1, 2))
    assert stays != comes
    reading, goes_on = asyncio.Event(), asyncio.Event()

    async def read_slowly(*arguments: Any, **options: Any) -> Restored:
        found = await read_whole(*arguments, **options)
        reading.set()
        await goes_on.wait()
        return found

    await send(bus, "run-1", numbers(0))
    await send(bus, "run-2", numbers(0, 1, 2))
    async with running(worker := make(bus, service)):
        assert await worker.caught_up(10)
        await worker.on_revoked(frozenset({comes}))
        await worker.on_assigned(frozenset({stays}))
        monkeypatch.setattr("tocsin.runtime.bus_io.read_whole", read_slowly)
        assigning = asyncio.create_task(worker.on_assigned(frozenset({comes})))
        await reading.wait()
        service.due_ms = 1
        worker.nudge()
        await until(lambda: service.due_ms is None, SOON_S, "a timer fires")
        assert comes.number not in service.ticks[-1].owned
        assert comes.number not in service.partitions, "half a state would be acted upon"
        goes_on.set()
        await assigning
        assert comes.number in worker._positions.numbers()
        assert service.partitions[comes.number]["run-2"].count == 3


async def test_of_a_restore_that_is_cut_off_nothing_is_left(bus: EmbeddedBus) -> None:
    await send(bus, "run-1", numbers(*range(10)))
    async with running(first := make(bus, FoldService(TOPICS))):
        assert await first.caught_up(10)
    began, goes_on = threading.Event(), threading.Event()

    class Slow(FoldService):
        def restore(self, partition: int, records: Sequence[Record]) -> None:
            super().restore(partition, records)
            began.set()
            goes_on.wait(SOON_S)

    number, service = telemetry_partition("run-1"), Slow(TOPICS)
    worker = make(bus, service)
    await worker._wiring.join()
    assigning = asyncio.create_task(
        worker.on_assigned(frozenset({Partition(TOPICS.telemetry, number)}))
    )
    await until(began.is_set)
    assigning.cancel()
    goes_on.set()
    await asyncio.wait({assigning})

    assert assigning.cancelled()
    assert service.forgotten == [number]
    assert number not in worker._positions.numbers()
    await worker._wiring.close()


async def test_what_began_before_a_restore_is_cut_off_goes_on_with_what_it_follows(
    bus: EmbeddedBus,
) -> None:
    runs = {telemetry_partition(run): run for run in ("run-1", "run-2")}
    for run in runs.values():
        await send(bus, run, numbers(*range(10)))
    async with running(first := make(bus, FoldService(TOPICS))):
        assert await first.caught_up(10)
    began, goes_on = threading.Event(), threading.Event()

    class Following(FoldService):
        def follows(self, partition: int) -> Sequence[Partition]:
            return [Partition(TOPICS.runs, partition)]

        def restore(self, partition: int, records: Sequence[Record]) -> None:
            super().restore(partition, records)
            if partition == max(runs):
                began.set()
                goes_on.wait(SOON_S)

    worker = make(bus, service := Following(TOPICS))
    await worker._wiring.join()
    await worker._wiring._stop_poll("input")  # nobody but this test assigns partitions
    places = frozenset(Partition(TOPICS.telemetry, number) for number in runs)
    assigning = asyncio.create_task(worker.on_assigned(places))
    await until(began.is_set)
    assigning.cancel()
    goes_on.set()
    await asyncio.wait({assigning})
    assert worker._positions.numbers() == {min(runs)}

    await worker.on_revoked(places)
    await worker.on_assigned(places)

    assert worker._positions.numbers() == set(runs)
    assert {service.partitions[number][run].count for number, run in runs.items()} == {10}
    assert set(worker._wiring._following) == {Partition(TOPICS.runs, number) for number in runs}
    await worker._wiring.close()


async def test_a_member_that_joins_while_another_restores_waits_and_nothing_is_lost(
    bus: EmbeddedBus,
) -> None:
    class Slow(FoldService):
        """Takes as long to restore as another member takes to join."""

        def restore(self, partition: int, records: Sequence[Record]) -> None:
            restoring.set()
            another_joins.wait(20)
            super().restore(partition, records)

    runs = [f"run-{i}" for i in range(6)]
    for run in runs:
        await send(bus, run, numbers(*range(10)))
    restoring, another_joins = threading.Event(), threading.Event()
    before = FoldService(TOPICS)
    first = make(bus, before)
    async with running(first):
        assert await first.caught_up(20)
    services = Slow(TOPICS), FoldService(TOPICS)
    slow, other = (make(bus, service) for service in services)
    async with running(slow):
        await until(restoring.is_set)
        async with running(other):
            await until(lambda: other.alive_ms is not None)
            another_joins.set()
            await until(lambda: bool(services[1].partitions))
            for run in runs:
                await send(bus, run, numbers(*range(10, 20)))
            applied = 20 * len(runs)
            await until(lambda: before.applied + sum(s.applied for s in services) >= applied)
    for run in runs:
        found = await outputs_of(bus, run)
        assert set(found) == set(expected_outputs(run, range(20)).items())


class FaultyProducer:
    """A real producer that fails when it is told to."""

    def __init__(self, bus: EmbeddedBus, faults: FaultyBus) -> None:
        self._faults = faults
        self._bus = bus

    async def publish(self, records: Sequence[Outgoing], /) -> Sequence[int]:
        producer = await self._bus.producer()
        self._faults.asked.append("publish")
        try:
            if self._faults.publish_failures > 0:
                self._faults.publish_failures -= 1
                raise BusUnavailable("the broker is away")
            return await producer.publish(records)
        finally:
            await producer.close()

    async def close(self) -> None:
        pass


class FaultyBus:
    """The embedded bus with faults on order."""

    def __init__(self, bus: EmbeddedBus) -> None:
        self._bus = bus
        self.publish_failures = 0
        self.fence = 0
        self.leaderless = False
        self.ends_failed = 0
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._bus, name)

    async def producer(self) -> FaultyProducer:
        return FaultyProducer(self._bus, self)

    async def consumer(self, *args: object, **more: object) -> object:
        consumer = await self._bus.consumer(*args, **more)  # type: ignore[arg-type]
        commit = consumer.commit

        async def commit_or_fence(offsets: Mapping[Partition, int]) -> None:
            self.asked.append("commit")
            if self.fence > 0:
                self.fence -= 1
                raise FencedMember("another member has it")
            await commit(offsets)

        ends = consumer.ends

        async def ends_or_none(partitions: Sequence[Partition]) -> Mapping[Partition, int]:
            if self.leaderless:
                self.ends_failed += 1
                raise BusUnavailable("no broker leads one of the partitions")
            return await ends(partitions)

        consumer.commit = commit_or_fence  # type: ignore[method-assign]
        consumer.ends = ends_or_none  # type: ignore[method-assign]
        return consumer


async def test_what_is_read_while_nothing_can_be_applied_does_not_pile_up(
    bus: EmbeddedBus,
) -> None:
    faulty, service = FaultyBus(bus), FoldService(TOPICS)
    worker = make(faulty, service)  # type: ignore[arg-type]
    held: list[int] = []

    def asked_often() -> bool:
        held.append(len(worker._wiring.records))
        return faulty.ends_failed >= 4

    async with running(worker):
        await until(worker.ready.is_set)
        # A timer that is due asks for the ends of all partitions; others are read meanwhile.
        faulty.leaderless, service.due_ms = True, 1
        worker.nudge()
        for run in ("run-1", "run-2"):
            await send(bus, run, numbers(*range(300)))
        faulty.ends_failed = 0
        await until(asked_often)
        assert service.applied == 0
        assert 0 < max(held) < 2 * QUICK.poll_records
        faulty.leaderless = False
        await until(lambda: service.applied == 600)
        assert await worker.caught_up(10)
    for run in ("run-1", "run-2"):
        assert dict(await outputs_of(bus, run)) == expected_outputs(run, range(300))
    assert service.forgotten == [], "it has not joined again"


async def test_a_bus_that_goes_away_costs_nothing_but_time(
    bus: EmbeddedBus, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyBus(bus)
    service = FoldService(TOPICS)
    worker = make(faulty, service)  # type: ignore[arg-type]

    async with running(worker):
        await until(worker.ready.is_set)
        faulty.publish_failures = 3
        await send(bus, "run-1", numbers(*range(21)))
        await until(lambda: faulty.publish_failures == 0)
        assert await worker.caught_up(10)

    said = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert said == ["the bus does not answer, trying again: the broker is away"]
    assert service.applied == 21
    assert service.forgotten == []
    assert await outputs_of(bus, "run-1") == list(expected_outputs("run-1", range(21)).items())


async def test_a_service_is_told_once_that_the_bus_was_away(bus: EmbeddedBus) -> None:
    class Asking(FoldService):
        def __init__(self) -> None:
            super().__init__(TOPICS)
            self.was_away: list[bool] = []

        def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
            self.was_away += [tick.was_away for _ in records[:1]]
            return super().apply(records, tick)

    faulty = FaultyBus(bus)
    service = Asking()
    worker = make(faulty, service, only_runs=["run-1"])  # type: ignore[arg-type]
    await send(bus, "run-1", numbers(1))
    async with running(worker):
        assert await worker.caught_up(10)
        faulty.publish_failures = 1
        await send(bus, "run-1", numbers(2))
        await until(lambda: faulty.publish_failures == 0)
        for number in (3, 4):
            await send(bus, "run-1", numbers(number))
            assert await worker.caught_up(10)
    assert service.was_away[0] is False
    assert service.was_away.count(True) == 1


async def test_a_fenced_member_drops_its_state_and_joins_again(bus: EmbeddedBus) -> None:
    faulty = FaultyBus(bus)
    faulty.fence = 1
    service = FoldService(TOPICS)
    metrics = PrometheusMetrics()
    worker = make(faulty, service, only_runs=["run-1"], metrics=metrics)  # type: ignore[arg-type]
    await send(bus, "run-1", numbers(*range(21)))

    async with running(worker):
        await until(lambda: bool(service.forgotten))
        assert await worker.caught_up(10)

    # The snapshots of the fenced checkpoint were written, so the records are not folded again.
    assert await outputs_of(bus, "run-1") == list(expected_outputs("run-1", range(21)).items())
    assert metrics.value(names.FENCED, service="fold") == 1


@asynccontextmanager
async def at_rest(
    bus: EmbeddedBus,
) -> AsyncIterator[tuple[Worker, FaultyBus, FakeClock, Hanging]]:
    """A worker that has read seven numbers and saved them; its bus, its clock and its service."""
    faulty, clock, service = FaultyBus(bus), FakeClock(), Hanging(TOPICS)
    service.free = threading.Event()
    service.free.set()
    worker = make(faulty, service, clock=clock)  # type: ignore[arg-type]
    async with running(worker):
        await send(bus, "run-1", numbers(*range(7)))
        assert await worker.caught_up(10)
        yield worker, faulty, clock, service


async def test_a_worker_that_was_frozen_asks_whether_it_is_a_member_before_it_writes(
    bus: EmbeddedBus,
) -> None:
    async with at_rest(bus) as (worker, faulty, clock, service):
        assert faulty.asked[0] == "publish"

        # It is frozen with records in its hands, and another member has them by now.
        service.free.clear()
        faulty.asked.clear()
        await send(bus, "run-1", numbers(*range(7, 14)))
        await until(lambda: service.hangs)
        faulty.fence = 1
        clock.advance(s=10)
        service.free.set()
        await until(lambda: bool(service.forgotten))
        assert faulty.asked[0] == "commit"
        assert len(await outputs_of(bus, "run-1")) == 1
        assert await worker.caught_up(10)
    assert await outputs_of(bus, "run-1") == list(expected_outputs("run-1", range(14)).items())


async def test_a_worker_that_was_frozen_while_it_had_nothing_to_write_asks_too(
    bus: EmbeddedBus,
) -> None:
    async with at_rest(bus) as (worker, faulty, clock, service):
        # It wakes up, and its first round has nothing to do; what comes after that is another's.
        faulty.asked.clear()
        faulty.fence = 1
        clock.advance(s=10)
        worker.nudge()
        await until(lambda: bool(service.forgotten))
        assert faulty.asked[0] == "commit"
        await send(bus, "run-1", numbers(*range(7, 14)))
        assert await worker.caught_up(10)
    assert await outputs_of(bus, "run-1") == list(expected_outputs("run-1", range(14)).items())


async def test_records_of_a_skipped_run_wait_and_hold_the_commit_back(bus: EmbeddedBus) -> None:
    class Holding(FoldService):
        holds_skipped = True

    clock = FakeClock()
    skipped = {"run-1"}

    async def skip(run: str) -> bool:
        return run in skipped

    service = Holding(TOPICS)
    worker = make(bus, service, skip=skip, clock=clock)
    await send(bus, "run-1", numbers(*range(7)))
    await send(bus, "run-2", numbers(*range(7)))

    async with running(worker):
        await until(lambda: service.applied == 7)
        clock.advance(s=1)
        worker.nudge()
        where = Partition(TOPICS.telemetry, telemetry_partition("run-1"))
        watcher = await bus.consumer("g", [TOPICS.telemetry], only=[where])
        assert not await watcher.committed(where)
        skipped.clear()
        clock.advance(s=5)
        worker.nudge()
        await until(lambda: service.applied == 14)
        assert await worker.caught_up(10)
        assert await watcher.committed(where) == 7


async def test_a_service_is_told_of_a_run_that_another_process_took(bus: EmbeddedBus) -> None:
    class Losing(FoldService):
        holds_skipped = True

        def lost(self, runs: Collection[str]) -> None:
            told.append((frozenset(runs), self.applied))

    told: list[tuple[frozenset[str], int]] = []
    clock, elsewhere = FakeClock(), set[str]()

    async def skip(run: str) -> bool:
        return run in elsewhere

    service = Losing(TOPICS)
    worker = make(bus, service, skip=skip, clock=clock)
    await send(bus, "run-1", numbers(*range(3)))
    async with running(worker):
        await until(lambda: service.applied == 3)
        elsewhere.add("run-1")
        clock.advance(s=5)
        await send(bus, "run-1", numbers(*range(3, 6)))
        await until(lambda: bool(told))
        elsewhere.clear()
        clock.advance(s=5)
        worker.nudge()
        await until(lambda: service.applied == 6)
    assert told == [(frozenset({"run-1"}), 3)], "before any of its records was left out"


async def test_a_timer_is_told_when_the_worker_has_caught_up(bus: EmbeddedBus) -> None:
    service = FoldService(TOPICS)
    clock = FakeClock()
    service.due_ms = clock.now_ms() + 1000
    worker = make(bus, service, only_runs=["run-1"], clock=clock)

    async with running(worker):
        await until(worker.ready.is_set)
        worker.nudge()
        await until(lambda: bool(service.ticks))
        due_ms = clock.advance(s=1)
        worker.nudge()
        await until(lambda: worker.last_round_ms == due_ms)
        assert service.due_ms is not None, "no record has shown the bus's time yet"
        now_ms = clock.advance(ms=SETTLING_MS)
        worker.nudge()
        await until(lambda: service.due_ms is None)

    number = telemetry_partition("run-1")
    tick = next(tick for tick in service.ticks if tick.caught_up)
    assert tick.owned == {number}
    assert tick.caught_up[number].as_of_ms == now_ms


def deleted(path: Path) -> None:
    for file in path.parent.glob("bus.db*"):
        if file.is_file():
            file.unlink()


def damaged(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:16_384] + b"\xa5" * (len(whole) - 16_384))


@pytest.mark.parametrize("harm", [deleted, damaged], ids=["deleted", "damaged"])
async def test_a_bus_file_that_was_replaced_begins_again(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "bus.db"
    service = FoldService(TOPICS)
    async with EmbeddedBus(path) as bus:
        await bus.init(TOPICS.specs())
        worker = make(bus, service, only_runs=["run-1"])
        producer = await bus.producer()
        await send(bus, "run-1", numbers(*range(20)))
        async with running(worker):
            assert await worker.caught_up(10)
            harm(path)
            where = Partition(TOPICS.telemetry, telemetry_partition("run-1"))
            await producer.publish([Outgoing(where, b"run-1", v) for v in numbers(*range(14))])
            await until(lambda: service.applied == 34)
            assert await worker.caught_up(10)
        assert await outputs_of(bus, "run-1") == list(expected_outputs("run-1", range(14)).items())
