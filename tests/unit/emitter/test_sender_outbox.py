from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from support.captured import said
from support.waiting import wait_until
from tocsin.bus.embedded import EmbeddedBus, EmbeddedProducer
from tocsin.bus.port import BusUnavailable, Outgoing
from tocsin.emitter.outbox import Outbox, Said, StepRow, Worth, pack
from tocsin.emitter.sender import Address, Sender
from tocsin.schemas.runs import Heartbeat, PhaseMark, RunEnded
from tocsin.schemas.telemetry import Speaker, TensorFrame
from tocsin.schemas.topics import Topics

SPEAKER = Speaker(run_id="r1", incarnation="i1")


def frame(step: int, rows: int = 10) -> TensorFrame:
    return TensorFrame(
        speaker=SPEAKER,
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


def beat(step: int) -> Said:
    return Said(Heartbeat(run_id="r1", incarnation="i1", last_step=step), 0)


def test_the_oldest_of_the_least_worth_is_dropped_first() -> None:
    box = Outbox(max_items=4)
    box.put(Said(ended(), 0), Worth.LIFECYCLE)
    box.put(row(0), Worth.SCALARS)
    box.put(frame(0), Worth.TENSORS)
    box.put(frame(1), Worth.TENSORS)
    box.put(row(1), Worth.SCALARS)
    box.put(row(2), Worth.SCALARS)
    box.put(row(3), Worth.SCALARS)
    assert box.dropped == 3
    items = box.take()
    assert [i.step for i in items if isinstance(i, StepRow)] == [1, 2, 3]
    assert isinstance(items[0], Said)
    assert len(box) == 0


def test_lifecycle_is_never_dropped_and_bytes_count() -> None:
    box = Outbox(max_items=3)
    for _ in range(5):
        box.put(Said(ended(), 0), Worth.LIFECYCLE)
    assert (len(box), box.dropped) == (5, 0)
    small = Outbox(max_bytes=5_000)
    for step in range(100):
        small.put(frame(step), Worth.TENSORS)
    assert 0 < len(small) < 10


def test_only_the_newest_heartbeat_waits() -> None:
    box = Outbox()
    for step in range(3):
        box.put(beat(step), Worth.LIFECYCLE, replaces=Heartbeat)
    (only,) = box.take()
    assert isinstance(only, Said)
    assert isinstance(only.data, Heartbeat)
    assert only.data.last_step == 2


def test_rows_become_one_frame() -> None:
    packed = pack([row(3), row(4)], SPEAKER)
    assert packed.steps.tolist() == [3, 4]
    assert packed.values.tolist() == [[3.0], [4.0]]


def make(folder: Path, told: list[str], **more: object) -> Sender:
    address = Address(topics=Topics(), speaker=SPEAKER, source="/runs/r1", create_topics=True)
    return Sender(lambda: EmbeddedBus(folder / "bus.db"), address, tell=told.append, **more)  # type: ignore[arg-type]


def test_records_are_numbered_and_coalesced(tmp_path: Path) -> None:
    sender = make(tmp_path, [])
    sender.start()
    for step in range(200):
        sender.row(row(step))
        sender.row(row(step, "log.a"))
    sender.frame(frame(7))
    sender.say(ended())
    assert sender.close(10.0)
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(200))
    assert len(found.metas) < 60
    assert [meta.seq for meta in found.metas] == list(range(len(found.metas)))
    assert len(found.of(RunEnded)) == 1


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
    sender.say(ended())
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

    address = Address(topics=Topics(), speaker=SPEAKER, source="/runs/r1")
    sender = Sender(refuse, address, tell=told.append)
    sender.start()
    sender.say(PhaseMark(run_id="r1", incarnation="i1", name="x", edge="begin"))
    wait_until(lambda: told)
    began = time.monotonic()
    assert not sender.close(5.0)
    assert time.monotonic() - began < 4.0
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
    assert sender.close(10.0)
    assert len(said(tmp_path).of(Heartbeat)) >= 3
