"""The store: rows written on one core, bytes against raw frames, reads before and after sorting.

`python benchmarks/store.py` writes a run of 2,000 tensors with 7 statistics and 4 counts each, step
by step, as the archive does: decoded, flushed in portions, then sorted by tensor. Its peers do the
same rows in the same process: rows inserted one by one into DuckDB and SQLite (`executemany`), and
the raw frames as the bus has them, compressed with zstd. All on one thread; processor time, since
the machine may do other things.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cramjam
import duckdb
import numpy as np

from tocsin.bus.port import Partition, Record
from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    RecordOrigin,
    TensorFrame,
)
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.store import open_run
from tocsin.store.archive.batch import Taken
from tocsin.store.archive.flush import flush
from tocsin.store.archive.merge import compact
from tocsin.store.archive.records import read_record
from tocsin.store.catalog import Store
from tocsin.store.parquet.duck import Duck
from tocsin.store.storage.local import LocalStorage

TENSORS = 2_000
PORTION = 32 * 1024 * 1024
INSERTED = 20_000
"""Rows that the peers insert one by one: more take too long."""

ROUNDS = 7
RUN = "gpt-2026-11-21"
NAMES = tuple(f"transformer.blocks.{i // 16}.attention.{i % 16}.weight" for i in range(TENSORS))
ONE = NAMES[TENSORS // 3]


def records(steps: int) -> Iterator[Record]:
    """A run whose statistics wander, as those of a training do."""
    random = np.random.default_rng(0)
    place = Partition(Topics().telemetry, telemetry_partition(RUN))
    values = random.lognormal(size=(TENSORS, len(STATISTIC_COLUMNS)))
    counts = np.zeros((TENSORS, len(COUNT_COLUMNS)), np.uint64)
    counts[:, 0] = random.integers(100, 2**24, TENSORS)
    for step in range(steps):
        values *= np.exp(0.02 * random.standard_normal(values.shape))
        counts[:, 1] = random.integers(0, 50, TENSORS)
        frame = TensorFrame(
            origin=RecordOrigin(run_id=RUN, incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11"),
            step=10 * step,
            collection="gradients",
            rows=NAMES,
            columns=STATISTIC_COLUMNS,
            values=values.astype(np.float32),
            count_columns=COUNT_COLUMNS,
            counts=counts,
            at_us=1_795_258_012_000_000 + step * 1_000_000,
            every=10,
        )
        headers = meta_of(frame, boot="boot", seq=step).headers()
        yield Record(place, step, step, RUN.encode(), frame.encode(), headers)


def archive(store: Store, telemetry: list[Record]) -> float:
    """Decode and write all of it; processor seconds."""
    began = time.process_time()
    taken: list[Taken] = []
    size = 0
    for record in telemetry:
        found = read_record(record, "telemetry")
        assert found is not None
        taken.append(found[1])
        size += found[1].size_bytes
        if size >= PORTION or record is telemetry[-1]:
            flush(store, RUN, "telemetry", taken, runs_topic=Topics().runs, now_ms=1)
            taken, size = [], 0
    return time.process_time() - began


def inserted(
    telemetry: list[Record], insert: Callable[[list[tuple[object, ...]]], object]
) -> float:
    """The first rows, one by one, as anybody would begin; processor seconds."""
    began = time.process_time()
    rows: list[tuple[object, ...]] = []
    for record in telemetry:
        frame = TensorFrame.decode(record.value or b"")
        table = zip(frame.rows, frame.values.tolist(), frame.counts.tolist(), strict=True)
        rows += [(frame.step, name, *values, *counts) for name, values, counts in table]
        if len(rows) >= INSERTED:
            break
    insert(rows[:INSERTED])
    return time.process_time() - began


def read_times(store: Store) -> float:
    """One statistic of one tensor over all steps, processor milliseconds; the median after the
    first."""
    run = open_run(RUN, store=store)
    tensor = run.tensor(ONE, "gradients")
    took = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        tensor.statistic("l2")
        took.append(1000 * (time.process_time() - began))
    return statistics.median(took[1:])


def scan(compressed: list[bytes]) -> float:
    """The same from raw frames."""
    began = time.process_time()
    place = NAMES.index(ONE)
    for one in compressed:
        frame = TensorFrame.decode(bytes(cramjam.zstd.decompress(one)))
        found = frame.column("l2")
        assert found is not None
        float(found[place])
    return 1000 * (time.process_time() - began)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    telemetry = list(records(arguments.steps))
    rows = TENSORS * arguments.steps
    raw = sum(len(record.value or b"") for record in telemetry)
    print(f"{rows:,} rows of {TENSORS:,} tensors, {raw / 1e6:.0f} MB of raw frames")
    began = time.process_time()
    compressed = [bytes(cramjam.zstd.compress(record.value or b"", 3)) for record in telemetry]
    zstd_s, zstd = time.process_time() - began, sum(map(len, compressed))
    columns = ", ".join(f'"{name}" FLOAT' for name in STATISTIC_COLUMNS)
    columns += "".join(f', "{name}" UBIGINT' for name in COUNT_COLUMNS)
    marks = ", ".join("?" * (2 + len(STATISTIC_COLUMNS) + len(COUNT_COLUMNS)))
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder) / "store")
        store = Store(storage)
        store._duck = Duck(threads=1)
        took_s = archive(store, telemetry)
        arrival = store.runs()[0].size_bytes
        before_ms = read_times(store)
        began = time.process_time()
        compact(store, RUN, "telemetry", topics=Topics())
        sort_s = time.process_time() - began
        by_tensor = store.runs()[0].size_bytes
        after_ms = read_times(store)
        duck = duckdb.connect(f"{folder}/peer.duckdb", config={"threads": 1})
        duck.execute(f"CREATE TABLE t (step BIGINT, tensor VARCHAR, {columns})")
        duck_s = inserted(
            telemetry,
            lambda rows: duck.executemany(f"INSERT INTO t VALUES ({marks})", rows[:2_000]),
        ) * (INSERTED / 2_000)
        duck.close()
        lite = sqlite3.connect(f"{folder}/peer.sqlite")
        lite.execute(f"CREATE TABLE t (step, tensor, {columns})")

        def into_sqlite(rows: list[tuple[object, ...]]) -> None:
            lite.executemany(f"INSERT INTO t VALUES ({marks})", rows)
            lite.commit()

        lite_s = inserted(telemetry, into_sqlite)
        lite.close()
    print(f"{'':34}{'rows/s':>12}{'of the raw frames':>20}{'one tensor':>13}")
    for name, rate, size, read_ms in (
        ("tocsin, in order of arrival", rows / took_s, arrival, before_ms),
        ("tocsin, sorted by tensor", rows / (took_s + sort_s), by_tensor, after_ms),
        ("raw frames with zstd", rows / zstd_s, zstd, scan(compressed)),
        ("SQLite, row by row", INSERTED / lite_s, None, None),
        ("DuckDB, row by row", INSERTED / duck_s, None, None),
    ):
        share = "" if size is None else f"{100 * size / raw:.1f} %"
        shown = "" if read_ms is None else f"{read_ms:.1f} ms"
        print(f"{name:34}{rate:12,.0f}{share:>20}{shown:>13}")
    print(f"sorting alone: {rows / sort_s:,.0f} rows/s; target: 50,000 rows/s written")


if __name__ == "__main__":
    main()
