from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from support.trainings.captured import said
from support.waiting import SOON_S, wait_until
from tocsin.bus.embedded.bus import EmbeddedBus, EmbeddedProducer
from tocsin.bus.port import BusUnavailable, Outgoing
from tocsin.emitter.send.encoding import Address
from tocsin.emitter.send.outbox import (
    Item,
    Outbox,
    Priority,
    QueuedEvent,
    StepRow,
    pack,
    priority_of,
)
from tocsin.emitter.send.pace import CALM_S, EARLY_S, HURRIES, SPACING_S, Pace
from tocsin.emitter.send.sender import Sender
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    MAX_FRAME_BYTES,
    STATISTIC_COLUMNS,
    RecordOrigin,
    StepFrame,
    SystemFrame,
    TensorFrame,
)
from tocsin.schemas.records.runs import (
    CaptureDegraded,
    Heartbeat,
    PhaseMark,
    RunEnded,
)
from tocsin.schemas.topics import Topics

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")


def frame(step: int, rows: int = 10) -> TensorFrame:
    return TensorFrame(
        origin=ORIGIN,
        step=step,
        collection="gradients",
        rows=tuple(f"layer.{i}" for i in range(rows)),
        columns=("l2",),
        values=np.zeros((rows, 1), np.float32),
        count_columns=("numel",),
        counts=np.zeros((rows, 1), np.uint64),
    )


def row(step: int, name: str = "loss") -> StepRow:
    return StepRow(step, step * 10, (name,), (float(step),))


def ended() -> RunEnded:
    return RunEnded(run_id="r1", incarnation="i1", outcome="completed")


def beat(step: int) -> QueuedEvent:
    return QueuedEvent(Heartbeat(run_id="r1", incarnation="i1", last_step=step), 0)


def step_of(item: Item) -> int | None:
    return None if isinstance(item, QueuedEvent | SystemFrame) else item.step


def test_the_oldest_of_the_least_worth_is_dropped_first() -> None:
    box = Outbox(max_items=6)
    box.put(QueuedEvent(ended(), 0), Priority.LIFECYCLE)
    box.put(row(0), Priority.SCALARS)
    box.put(frame(0), Priority.TIER_2)
    box.put(frame(1), Priority.TIER_1)
    box.put(frame(2), Priority.TIER_1)
    box.put(frame(3), Priority.ANOMALY)
    box.put(frame(4), Priority.TIER_2)
    assert box.dropped == 1
    box.put(row(1), Priority.SCALARS)
    box.put(row(2), Priority.SCALARS)
    box.put(row(3), Priority.SCALARS)
    assert [step_of(item) for item in box.drain()] == [None, 0, 3, 1, 2, 3]
    assert (len(box), box.dropped) == (0, 4)


def test_of_what_was_odd_the_first_is_kept() -> None:
    box = Outbox(max_items=3)
    for step in range(10):
        box.put(row(step), Priority.ANOMALY)
    assert [step_of(item) for item in box.drain()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("collection", "priority"),
    [
        ("gradients", Priority.TIER_1),
        ("local_gradients", Priority.TIER_1),
        ("weights", Priority.TIER_1),
        ("updates", Priority.TIER_1),
        ("activations", Priority.TIER_2),
        ("optimizer_state", Priority.TIER_2),
        ("attention", Priority.TIER_2),
        ("my own", Priority.TIER_2),
    ],
)
def test_which_priority_a_collection_has(collection: str, priority: Priority) -> None:
    assert priority_of(collection) is priority


def test_items_are_taken_in_the_order_in_which_they_came() -> None:
    box = Outbox()
    for step in range(50):
        box.put(row(step), Priority.SCALARS)
        if step % 10 == 0:
            box.put(frame(step), Priority.TIER_1)
            box.put(beat(step), Priority.LIFECYCLE)
    taken = [box.drain(max_items=7) for _ in range(9)]
    assert [len(items) for items in taken] == [7] * 8 + [4]
    steps = [
        step_of(item) or 0 for items in taken for item in items if not isinstance(item, QueuedEvent)
    ]
    assert steps == sorted(steps)
    assert len(steps) == 55


def test_lifecycle_is_never_dropped_and_bytes_count() -> None:
    box = Outbox(max_items=3)
    for _ in range(5):
        box.put(QueuedEvent(ended(), 0), Priority.LIFECYCLE)
    assert (len(box), box.dropped) == (5, 0)
    small = Outbox(max_bytes=5_000)
    for step in range(100):
        small.put(frame(step), Priority.TIER_1)
    assert 0 < len(small) < 10


def test_only_the_newest_heartbeat_waits() -> None:
    box = Outbox()
    for step in range(3):
        box.put(beat(step), Priority.LIFECYCLE, replaces=Heartbeat)
    (only,) = box.drain()
    assert isinstance(only, QueuedEvent)
    assert isinstance(only.data, Heartbeat)
    assert only.data.last_step == 2


def test_rows_become_one_frame() -> None:
    packed = pack([row(3), row(4)], ORIGIN)
    assert packed.steps.tolist() == [3, 4]
    assert packed.values.tolist() == [[3.0], [4.0]]


def make(folder: Path, told: list[str], **more: object) -> Sender:
    address = Address(topics=Topics(), origin=ORIGIN, source="/runs/r1", create_topics=True)
    return Sender(lambda: EmbeddedBus(folder / "bus.db"), address, report=told.append, **more)  # type: ignore[arg-type]


def test_records_are_numbered_and_coalesced(tmp_path: Path) -> None:
    sender = make(tmp_path, [])
    sender.start()
    for step in range(200):
        sender.row(row(step))
        sender.row(row(step, "log.a"))
    sender.frame(frame(7))
    sender.publish(ended())
    assert sender.close(10.0)
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(200))
    assert len(found.metas) < 60
    assert [meta.seq for meta in found.metas] == list(range(len(found.metas)))
    assert len(found.of(RunEnded)) == 1


def test_the_sender_lives_while_it_waits_for_the_one_before(tmp_path: Path) -> None:
    over = threading.Event()
    beats: list[bool] = []

    def heartbeat() -> Data:
        beats.append(True)
        return Heartbeat(run_id="r1", incarnation="i1", last_step=len(beats))

    before = threading.Thread(target=over.wait, daemon=True)
    before.start()
    sender = make(tmp_path, [], heartbeat=heartbeat, heartbeat_s=0.01, after=[before])
    sender.start()
    sender.publish(ended())
    wait_until(lambda: len(beats) > 3)
    assert not (tmp_path / "bus.db").exists()
    over.set()
    assert sender.close(10.0)
    assert len(said(tmp_path).of(RunEnded)) == 1


def test_large_frames_are_split(tmp_path: Path) -> None:
    sender = make(tmp_path, [])
    sender.start()
    sender.frame(frame(1, rows=60_000))
    assert sender.close(10.0)
    frames = said(tmp_path).frames
    assert len(frames) > 1
    assert sum(len(f.rows) for f in frames) == 60_000


def test_a_bus_that_comes_back_gets_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    original, calls = EmbeddedProducer.publish, []

    async def flaky(self: EmbeddedProducer, records: Sequence[Outgoing], /) -> Sequence[int]:
        calls.append(len(records))
        if len(calls) <= 2:
            raise BusUnavailable("planted")
        return await original(self, records)

    monkeypatch.setattr(EmbeddedProducer, "publish", flaky)
    sender = make(tmp_path, told)
    sender.start()
    sender.publish(ended())
    wait_until(lambda: sender.records == 1)
    assert sender.close(10.0)
    assert len(said(tmp_path).of(RunEnded)) == 1
    assert len(told) == 2
    assert "planted" in told[0]
    assert "answers again" in told[1]


def test_exit_is_bounded_without_a_bus(tmp_path: Path) -> None:
    told: list[str] = []

    def refuse() -> EmbeddedBus:
        raise BusUnavailable("no broker")

    address = Address(topics=Topics(), origin=ORIGIN, source="/runs/r1")
    sender = Sender(refuse, address, report=told.append)
    sender.start()
    sender.publish(PhaseMark(run_id="r1", incarnation="i1", name="x", edge="begin"))
    wait_until(lambda: told)
    began = time.monotonic()
    assert not sender.close(4 * SOON_S)
    assert time.monotonic() - began < SOON_S
    assert len(told) == 1


def test_heartbeats_go_on_by_themselves(tmp_path: Path) -> None:
    sender = make(
        tmp_path,
        [],
        heartbeat=lambda: Heartbeat(run_id="r1", incarnation="i1"),
        heartbeat_s=0.01,
    )
    sender.start()
    wait_until(lambda: sender.records >= 3)
    sender.end_heartbeats()
    assert sender.flush(10.0)
    sent = sender.records
    time.sleep(0.1)
    assert sender.close(10.0)
    assert sender.records == sent
    assert len(said(tmp_path).of(Heartbeat)) >= 3


def test_the_pace_is_slow_only_while_records_come_all_the_time() -> None:
    pace = Pace()
    assert not pace.steady(0.0)
    for look in range(100):
        pace.checked(look * 0.02, found=True)
    assert not pace.steady(EARLY_S - 0.01)
    assert pace.steady(2.0)
    pace.checked(3.0, found=False)
    assert not pace.steady(1.98 + CALM_S + 0.01)
    pace.checked(5.0, found=True)
    assert not pace.steady(5.0)


def test_a_burst_of_urgent_records_may_hurry_for_a_while() -> None:
    pace = Pace()
    hurried = sum(pace.hurry(now * 0.001) for now in range(1_000))
    assert hurried == HURRIES + int(0.999 / SPACING_S)
    assert pace.hurry(10.0)


def test_rows_of_quick_steps_wait_for_company(tmp_path: Path) -> None:
    sender = make(tmp_path, [])
    sender.start()
    end, step = time.monotonic() + EARLY_S + 6 * SPACING_S, 0
    early = 0
    while time.monotonic() < end:
        sender.row(row(step))
        step += 1
        time.sleep(0.001)
        if not early and sender._pace.steady(time.monotonic()):
            early = sender.records
    assert sender.close(10.0)
    assert early >= 5
    assert sender.records - early <= 8
    assert sorted(said(tmp_path).steps()) == list(range(step))


def test_the_number_of_the_next_record_says_how_many_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    sender = make(tmp_path, told, outbox=Outbox(max_items=10))
    for step in range(25):
        sender.row(row(step))
    original = StepFrame.encode

    def refuse(self: StepFrame) -> bytes:
        if self.columns == ("log.bad",):
            raise MemoryError("planted")
        return original(self)

    monkeypatch.setattr(StepFrame, "encode", refuse)
    sender.start()
    wait_until(lambda: sender.records == 1)
    sender.row(row(25))
    sender.row(row(26, "log.bad"))
    sender.row(row(27, "log.bad"))
    sender.publish(ended())
    assert sender.close(10.0)
    found = said(tmp_path)
    assert sorted(found.steps()) == [*range(15, 26)]
    # 15 before the first record, and the two rows of which none could be made.
    assert [meta.seq for meta in found.metas] == [15, 16, 19, 20]
    assert sender.dropped == 17
    (degraded,) = found.of(CaptureDegraded)
    assert (degraded.probe, degraded.reason) == ("sending steps", "MemoryError: planted")
    assert [line for line in told if "sending steps has failed" in line] == told


def test_twenty_thousand_tensors_are_split_by_bytes_with_names_in_each(tmp_path: Path) -> None:
    sender = make(tmp_path, [])
    sender.start()
    names = tuple(f"model.layers.{i // 9}.self_attn.q_proj.weight.{i}" for i in range(20_000))
    whole = TensorFrame(
        origin=ORIGIN,
        step=4,
        collection="weights",
        rows=names,
        columns=STATISTIC_COLUMNS,
        values=np.arange(20_000 * 7, dtype=np.float32).reshape(20_000, 7),
        count_columns=COUNT_COLUMNS,
        counts=np.ones((20_000, 4), np.uint64),
    )
    sender.frame(whole)
    assert sender.close(20.0)
    frames = said(tmp_path).frames
    assert len(frames) == frames[0].parts > 1
    assert all(len(part.encode()) <= MAX_FRAME_BYTES for part in frames)
    assert sum((part.rows for part in frames), ()) == names
    assert np.array_equal(np.concatenate([part.values for part in frames]), whole.values)


def test_a_loop_that_fails_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    original, calls = Sender._rest, []

    async def fail_twice(self: Sender, wake: asyncio.Event) -> None:
        calls.append(1)
        if len(calls) in (1, 3):
            raise OSError(24, "Too many open files")
        await original(self, wake)

    monkeypatch.setattr(Sender, "_rest", fail_twice)
    sender = make(tmp_path, told)
    sender.start()
    wait_until(lambda: len(calls) > 3)
    sender.row(row(1))
    sender.publish(ended())
    assert sender.close(10.0)
    assert len(said(tmp_path).of(RunEnded)) == 1
    (degraded,) = said(tmp_path).of(CaptureDegraded)
    assert degraded.probe == "sending"
    assert len(told) == 1


def test_a_loop_that_hangs_keeps_nothing_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.emitter.send.sender.MAX_ITEMS", 100)
    sender = make(tmp_path, [])
    for step in range(500):
        sender.row(row(step))
    sender.publish(ended())
    sender.start()
    assert sender.close(10.0)
    assert sender.dropped == 399
    assert len(said(tmp_path).of(RunEnded)) == 1


def test_a_signals_handler_may_send_and_flush_while_a_flush_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, flushed = threading.Event(), []
    original = EmbeddedProducer.publish

    async def wait(self: EmbeddedProducer, records: Sequence[Outgoing], /) -> Sequence[int]:
        await asyncio.to_thread(hold.wait, 30.0)
        return await original(self, records)

    monkeypatch.setattr(EmbeddedProducer, "publish", wait)
    sender = make(tmp_path, [])
    sender.start()
    sender.row(row(1))

    def handler(number: int, frame: object) -> None:
        sender.row(row(2))
        sender.publish(ended())
        hold.set()
        flushed.append(sender.flush(10.0))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert sender.flush(10.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert flushed == [True]
    assert sender.close(10.0)
    assert sorted(said(tmp_path).steps()) == [1, 2]
