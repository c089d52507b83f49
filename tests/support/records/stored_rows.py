"""All rows that a store has of a run, and those that its records should give: to be compared as
multisets, so that a row that is lost or doubled shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from tocsin.bus.port import Record
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.store import Store

Rows = Counter[tuple[object, ...]]


def stored_rows(store: Store, run_id: str) -> Rows:
    """What the manifest names, read by DuckDB."""
    found: Rows = Counter()
    for one in store.files(run_id):
        match one.file.kind:
            case "steps":
                columns = ["step", "rank", "mode", "name", "value"]
            case "system":
                columns = ["node", "at_us", "name", "value"]
            case "events":
                columns = ["topic", "bus_offset", "value"]
            case _:
                columns = ["step", "rank", "mode", "tensor", "l2", "nans"]
        listed = ", ".join(columns)
        rows = store.duck.rows(f"SELECT {listed} FROM '{one.path}'")
        kind = (one.file.kind, one.file.collection)
        found.update((*kind, *map(_plain, row)) for row in rows)
    return found


def expected_rows(records: Iterable[Record]) -> Rows:
    """What the store should have of telemetry; repeats of a send are one."""
    found: Rows = Counter()
    seen = set()
    for record in records:
        meta = read_meta(record.headers)
        assert record.value is not None
        if (meta.boot, meta.seq) in seen:
            continue
        seen.add((meta.boot, meta.seq))
        frame = decode(meta, record.value)
        match frame:
            case StepFrame():
                found.update(
                    ("steps", "", int(step), frame.origin.rank, frame.mode, name, _plain(value))
                    for step, row in zip(frame.steps, frame.values, strict=True)
                    for name, value in zip(frame.columns, row, strict=True)
                )
            case SystemFrame():
                found.update(
                    ("system", "", frame.node, int(at_us), name, _plain(value))
                    for at_us, row in zip(frame.at_us, frame.values, strict=True)
                    for name, value in zip(frame.columns, row, strict=True)
                )
            case TensorFrame():
                l2, nans = frame.column("l2"), frame.count("nans")
                assert l2 is not None
                assert nans is not None
                about = (frame.step, frame.origin.rank, frame.mode)
                found.update(
                    ("tensors", frame.collection, *about, name, _plain(l2[i]), _plain(nans[i]))
                    for i, name in enumerate(frame.rows)
                )
            case Event():
                topic = record.partition.topic
                found["events", "", topic, record.offset, record.value.decode()] += 1
    return found


def _plain(value: object) -> object:
    if isinstance(value, float | np.floating):
        return "NaN" if np.isnan(value) else float(value)
    return int(value) if isinstance(value, np.integer) else value
