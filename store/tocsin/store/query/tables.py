"""The tables of numbers, as SQL over the Parquet files of a store. Pure.

Run, incarnation and collection of a file are in its manifest; so each view joins the files
with a table that does, `tocsin_files`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.store.manifest import Kind

FILES: Final = "tocsin_files"
"""The table of files: path, run_id, incarnation, collection."""

_OWN: Final = "f.run_id, f.incarnation"
_AT: Final = "make_timestamp(t.at_us)"

NUMBERS: Final[dict[str, Kind]] = {"steps": "steps", "tensors": "tensors", "system": "system"}
"""Table -> kind of the files."""

COLUMNS: Final[dict[str, Sequence[tuple[str, str, str]]]] = {
    "steps": (
        ("run_id", "VARCHAR", "the run"),
        ("incarnation", "VARCHAR", "its training"),
        ("mode", "VARCHAR", "train, eval or predict"),
        ("rank", "BIGINT", "the rank that sent it"),
        ("step", "BIGINT", "the step"),
        ("at", "TIMESTAMP", "the sender's clock, UTC"),
        ("name", "VARCHAR", "loss, lr.0, step_time_s, …"),
        ("value", "FLOAT", "the number"),
    ),
    "tensors": (
        ("run_id", "VARCHAR", "the run"),
        ("incarnation", "VARCHAR", "its training"),
        ("collection", "VARCHAR", "gradients, weights, …"),
        ("mode", "VARCHAR", "train, eval or predict"),
        ("rank", "BIGINT", "the rank that sent it"),
        ("step", "BIGINT", "the step"),
        ("at", "TIMESTAMP", "the sender's clock, UTC"),
        ("tensor", "VARCHAR", "its name"),
    ),
    "system": (
        ("run_id", "VARCHAR", "the run"),
        ("incarnation", "VARCHAR", "its training"),
        ("node", "VARCHAR", "host name"),
        ("at", "TIMESTAMP", "when it was sampled, UTC"),
        ("name", "VARCHAR", "cpu.percent, memory.used_bytes, …"),
        ("value", "DOUBLE", "the number"),
    ),
}
"""Columns of each table with type and meaning; `tensors` has one more for each statistic."""

_HIDDEN: Final = "filename, bus_offset, place, every, at_us, step, rank, mode, tensor"


def view_of(table: str, paths: Sequence[Path]) -> str:
    """The SELECT that a view is made of; without files one that has no rows."""
    if not paths:
        columns = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind, _ in COLUMNS[table])
        return f"SELECT {columns} WHERE false"
    listed = ", ".join(f"'{str(path).replace(chr(39), chr(39) * 2)}'" for path in paths)
    rows = (
        f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false, "
        f"filename = true) AS t JOIN {FILES} AS f ON t.filename = f.path"
    )
    match table:
        case "steps":
            chosen = f"{_OWN}, t.mode, t.rank, t.step, {_AT} AS at, t.name, t.value"
        case "system":
            chosen = f"{_OWN}, t.node, {_AT} AS at, t.name, t.value"
        case _:
            chosen = (
                f"{_OWN}, f.collection, t.mode, t.rank, t.step, {_AT} AS at, t.tensor, "
                f"t.* EXCLUDE ({_HIDDEN})"
            )
    return f"SELECT {chosen} FROM {rows}"
