"""Writes the tables of a run into files: CSV, JSON lines, Parquet.

Each file is written under another name and then renamed: one that is there is whole.
"""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from tocsin.schemas.errors import require_extra
from tocsin.schemas.whole_file import whole_file
from tocsin.store.errors import StoreUnavailable
from tocsin.store.export.tables import NUMBERS, Piece, facts, pieces
from tocsin.store.query.facts import Cell, Facts
from tocsin.store.run import Run

Format = Literal["csv", "jsonl", "parquet"]

_BATCH: Final = 50_000


def export_files(run: Run, folder: Path, form: Format) -> Mapping[Path, int]:
    """Write a file for each table into the folder; the rows of each. Blocks.

    Raises:
        MissingExtra: Parquet without the extra `store`.
        StoreUnavailable: the disk is full, or the folder cannot be written to.
    """
    if form == "parquet":
        require_extra("store", "an export to Parquet", "duckdb")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {path: rows for path, rows in _written(run, folder, form)}
    except OSError as error:
        raise StoreUnavailable(f"{folder} cannot be written: {error}") from error


def _written(run: Run, folder: Path, form: Format) -> Iterator[tuple[Path, int]]:
    for name, found in facts(run).items():
        typed = [(column, kind) for column, kind, _ in found.columns]
        yield _table(folder / f"{name}.{form}", form, typed, _fact_rows(found))
    for name, columns in NUMBERS.items():
        rows = (row for piece in pieces(run, name) for row in _rows(piece))
        yield _table(folder / f"{name}.{form}", form, columns, rows)


def _table(
    path: Path, form: Format, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]]
) -> tuple[Path, int]:
    count = 0

    def counted() -> Iterator[Sequence[Cell]]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    with whole_file(path) as made:
        if form == "parquet":
            _parquet(made, columns, counted())
        else:
            with made.open("w", encoding="utf-8", newline="") as file:
                names = [name for name, _ in columns]
                if form == "csv":
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerow(names)
                    writer.writerows([*map(_text, row)] for row in counted())
                else:
                    for row in counted():
                        values = dict(zip(names, map(_text, row), strict=True))
                        file.write(json.dumps(values, ensure_ascii=False) + "\n")
    return path, count


def _parquet(
    path: Path, columns: Sequence[tuple[str, str]], rows: Iterator[Sequence[Cell]]
) -> None:
    import duckdb

    # In a file of its own, which may be larger than memory.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tocsin-") as folder:
        connection = duckdb.connect(
            os.path.join(folder, "rows.db"),
            config={
                "memory_limit": "512MB",
                "threads": 2,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        try:
            types = ", ".join(f'"{name}" {kind}' for name, kind in columns)
            connection.execute(f"CREATE TABLE rows ({types})")
            listed = ", ".join(
                f"unnest(CAST(${number} AS {kind}[]))"
                for number, (_, kind) in enumerate(columns, start=1)
            )
            while batch := list(islice(rows, _BATCH)):
                connection.execute(
                    f"INSERT INTO rows SELECT {listed}",
                    [list(one) for one in zip(*batch, strict=True)],
                )
            text = str(path).replace("'", "''")
            connection.execute(f"COPY rows TO '{text}' (FORMAT parquet, COMPRESSION zstd)")
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise StoreUnavailable(f"{path} cannot be written: {error}") from error
        finally:
            connection.close()


def _rows(piece: Piece) -> Iterator[Sequence[Cell]]:
    lists = [one if isinstance(one, list) else one.tolist() for one in piece.columns]  # type: ignore[union-attr]
    for row in zip(*lists, strict=True):
        yield (*piece.same, *row)


def _fact_rows(found: Facts) -> Iterator[Sequence[Cell]]:
    times = {place for place, (_, kind, _) in enumerate(found.columns) if kind == "TIMESTAMP"}
    for row in zip(*found.values, strict=True):
        yield [_time(value) if place in times else value for place, value in enumerate(row)]


def _time(at_ms: Cell) -> Cell:
    if not isinstance(at_ms, int):
        return None
    text = datetime.fromtimestamp(at_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _text(value: Cell) -> Cell:
    """A number that is not finite as a word: JSON has none for it, and CSV has this one."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
