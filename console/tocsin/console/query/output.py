"""The answer to a question as a table, as JSON, or as CSV. Pure."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TextIO

from rich.table import Table
from rich.text import Text

from tocsin.schemas.text import number_text, plain_line, still

Cell = str | int | float | bool | None

SHOWN: Final = 1_000
"""Rows of the table for people."""


def shown(
    columns: Sequence[tuple[str, str]], rows: Iterator[Sequence[Cell]]
) -> tuple[Table | None, str]:
    """The table of the first rows, and a line about it; no table if there are no rows."""
    first = list(islice(rows, SHOWN))
    more = next(rows, None) is not None
    if not first:
        return None, f"no rows ({', '.join(name for name, _ in columns)})"
    table = Table(box=None)
    for place, (name, _) in enumerate(columns):
        numbers = all(isinstance(row[place], int | float | None) for row in first)
        table.add_column(
            Text(plain_line(name)), justify="right" if numbers else "left", overflow="fold"
        )
    for row in first:
        table.add_row(*(Text(_text(value)) for value in row))
    count = f"{len(first):,} row{'s' * (len(first) != 1)}"
    return table, f"the first {count}; --csv and --json print all" if more else count


def as_json(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    """One object with `version`, `columns` and `rows`, in pieces of text.

    Numbers that are not finite are the words "NaN", "Infinity" and "-Infinity".
    """
    named = [{"name": name, "type": kind} for name, kind in columns]
    yield f'{{"version": 1, "columns": {json.dumps(named)}, "rows": ['
    before = "\n"
    for row in rows:
        yield before + json.dumps([_real(value) for value in row])
        before = ",\n"
    yield "\n]}\n"


def write_csv(
    columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]], out: TextIO
) -> None:
    """A line of names, then one for each row; NULL is an empty cell.

    On a terminal no text steers it; a file gets each text as it is.
    """
    shown = out.isatty()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([still(name) if shown else name for name, _ in columns])
    for row in rows:
        cells = [_real(value) for value in row]
        if shown:
            cells = [still(cell) if isinstance(cell, str) else cell for cell in cells]
        writer.writerow(cells)


def _text(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value)
    return plain_line(str(value))


def _real(value: Cell) -> Cell:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
