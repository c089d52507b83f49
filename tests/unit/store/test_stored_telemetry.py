"""What the store gives back as telemetry is what was on the bus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from support.processes.archive import archive_all
from support.records.made_runs import made_run
from support.records.on_bus import read_all, send
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Record
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import Frame, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.store import open_store
from tocsin.store.archive.merge import compact
from tocsin.store.parquet.tables import MAX_COLUMNS
from tocsin.store.stored import StoredFiles
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()


def columns(frame: Frame) -> Mapping[str, bytes]:
    """Each column's numbers, bit for bit."""
    found = {name: np.ascontiguousarray(frame.column(name)).tobytes() for name in frame.columns}
    if isinstance(frame, TensorFrame):
        counts = frame.count_columns
        found |= {name: np.ascontiguousarray(frame.count(name)).tobytes() for name in counts}
    return found


def facts(frame: Frame) -> tuple[object, ...]:
    """All else."""
    match frame:
        case TensorFrame():
            own: tuple[object, ...] = (
                frame.collection, frame.rows, frame.step, frame.mode, frame.every, frame.at_us,
                frame.part, frame.parts,
            )  # fmt: skip
        case StepFrame():
            own = (frame.steps.tolist(), frame.at_us.tolist(), frame.mode)
        case SystemFrame():
            own = (frame.node, frame.at_us.tolist())
    return (type(frame).__name__, frame.origin, *own)


def split(run: RunBuilder, step: int, rank: int, part: int) -> TensorFrame:
    """A part of a summary; checksums use all bits of a count."""
    return TensorFrame(
        origin=run.origin(rank),
        step=step,
        collection="gradients",
        rows=(f"t{part}",),
        columns=("l2",),
        values=np.ones((1, 1), np.float32),
        count_columns=("checksum",),
        counts=np.full((1, 1), 2**64 - 1 - part, np.uint64),
        at_us=run.now_ms * 1000,
        part=part,
        parts=3,
    )


def big_run() -> RunBuilder:
    """Two ranks, summaries in several parts and with more statistics than a table has."""
    run = RunBuilder("big", world_size=2)
    run.started()
    wide = {f"s{number}": float(number) for number in range(MAX_COLUMNS + 3)}
    for step in range(3):
        for rank in (0, 1):
            run.steps([2 * step, 2 * step + 1], rank=rank, loss=1.0 + rank)
            for part in range(3):
                run.add(split(run, step, rank, part), rank=rank)
            run.tensors(step, "activations", ("a", "b"), rank=rank, columns=wide)
    return run


@pytest.mark.parametrize("records", [made_run().telemetry, big_run().records], ids=["made", "big"])
@pytest.mark.parametrize("merged", [False, True])
async def test_it_is_what_was_on_the_bus(
    tmp_path: Path, records: Sequence[Record], merged: bool
) -> None:
    run_id = records[0].key.decode()
    store = open_store(tmp_path / "store")
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        await send(bus, records)
        await archive_all(bus, store)
        on_bus = await read_all(bus, TOPICS.telemetry, telemetry_partition(run_id))
    if merged:
        assert compact(store, run_id, "telemetry", topics=TOPICS)
    stored = StoredFiles(store, run_id).telemetry(TOPICS)

    assert [one.offset for one in stored] == [one.offset for one in on_bus]
    assert [one.append_ms for one in stored] == [one.append_ms for one in on_bus]
    for before, after in zip(on_bus, stored, strict=True):
        was = decode(read_meta(before.headers), before.value or b"")
        now = decode(read_meta(after.headers), after.value or b"")
        assert (before.key, read_meta(before.headers).rank) == (
            after.key,
            read_meta(after.headers).rank,
        )
        if isinstance(was, Event):
            assert before.value == after.value
            continue
        assert isinstance(was, StepFrame | SystemFrame | TensorFrame)
        assert isinstance(now, type(was))
        assert facts(now) == facts(was)
        assert columns(now) == columns(was)
