"""How fast and how large a summary of 2,000 tensors is, against rows of JSON.

`python benchmarks/codec.py` prints one line for each form; the ratios come from the same run, with
the forms taking turns, so that whatever else the machine does weighs on both.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import zlib
from collections.abc import Callable

import numpy as np

from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    Counts,
    Floats,
    RecordOrigin,
    TensorFrame,
)

TENSORS = 2_000
ROUNDS = 200
JSON_ROUNDS = 20


def summary() -> TensorFrame:
    """A summary as a large model sends it, with a NaN and an infinity in it."""
    random = np.random.default_rng(0)
    values = random.standard_normal((TENSORS, len(STATISTIC_COLUMNS))).astype(np.float32)
    values[7, 0], values[8, 1] = math.nan, math.inf
    return TensorFrame(
        origin=RecordOrigin(
            run_id="gpt-2026-11-21", incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11"
        ),
        step=1200,
        collection="gradients",
        rows=tuple(
            f"transformer.blocks.{i // 16}.attention.{i % 16}.weight" for i in range(TENSORS)
        ),
        columns=STATISTIC_COLUMNS,
        values=values,
        count_columns=COUNT_COLUMNS,
        counts=random.integers(0, 2**24, (TENSORS, len(COUNT_COLUMNS)), dtype=np.uint64),
    )


def to_rows(frame: TensorFrame) -> bytes:
    """The usual way: one JSON object for each tensor."""
    columns = (*frame.columns, *frame.count_columns)
    table = zip(frame.rows, frame.values.tolist(), frame.counts.tolist(), strict=True)
    return json.dumps(
        [{"name": name, **dict(zip(columns, [*v, *c], strict=True))} for name, v, c in table]
    ).encode()


def from_rows(value: bytes) -> tuple[tuple[str, ...], Floats, Counts]:
    """Back to names and arrays, which is what a rule needs."""
    rows = json.loads(value)
    return (
        tuple(row["name"] for row in rows),
        np.array([[row[c] for c in STATISTIC_COLUMNS] for row in rows], np.float32),
        np.array([[row[c] for c in COUNT_COLUMNS] for row in rows], np.uint64),
    )


def median_ms(function: Callable[[], object], rounds: int) -> float:
    """Median duration of one call, milliseconds."""
    function()
    durations = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations) * 1e3


def main() -> None:
    """Measure and print."""
    frame = summary()
    value, rows = frame.encode(), to_rows(frame)
    samples: dict[str, list[float]] = {name: [] for name in ("enc", "dec", "rows enc", "rows dec")}
    for _ in range(5):
        samples["enc"].append(median_ms(frame.encode, ROUNDS))
        samples["rows enc"].append(median_ms(lambda: to_rows(frame), JSON_ROUNDS))
        samples["dec"].append(median_ms(lambda: TensorFrame.decode(value), ROUNDS))
        samples["rows dec"].append(median_ms(lambda: from_rows(rows), JSON_ROUNDS))
    ms = {name: statistics.median(figures) for name, figures in samples.items()}

    cells = TENSORS * (len(STATISTIC_COLUMNS) + len(COUNT_COLUMNS))
    print(f"{TENSORS:,} tensors, {cells:,} cells")
    print(
        f"frame      {len(value):>9,} bytes  {len(zlib.compress(value, 1)):>9,} deflated  "
        f"encode {ms['enc']:7.3f} ms  decode {ms['dec']:7.3f} ms"
    )
    print(
        f"JSON rows  {len(rows):>9,} bytes  {len(zlib.compress(rows, 1)):>9,} deflated  "
        f"encode {ms['rows enc']:7.3f} ms  decode {ms['rows dec']:7.3f} ms"
    )
    print(
        f"ratio      {len(rows) / len(value):>8.1f}x{'':29}"
        f"encode {ms['rows enc'] / ms['enc']:6.0f}x   "
        f"decode {ms['rows dec'] / ms['dec']:6.0f}x"
    )


if __name__ == "__main__":
    main()
