"""The answer of `tocsin query`, for people and programs."""

from __future__ import annotations

import csv
import io
import json

from rich.console import Console

from tocsin.console.query.output import SHOWN, Cell, as_json, shown, write_csv

COLUMNS = [("name", "VARCHAR"), ("value", "DOUBLE")]
ROWS: list[list[Cell]] = [["a\x1b[2J,b", 1.5], [None, float("nan")], ["c", float("-inf")]]


def test_a_table_for_people_steers_no_terminal() -> None:
    table, line = shown(COLUMNS, iter(ROWS))
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    assert "\x1b" not in out.getvalue()
    assert [text.split()[-1] for text in out.getvalue().splitlines()[1:]] == [
        "1.5",
        "NaN",
        "-Infinity",
    ]
    assert line == "3 rows"


def test_a_long_answer_says_how_to_get_all() -> None:
    _, line = shown(COLUMNS, iter([["a", 1.0]] * (SHOWN + 1)))
    assert line == "the first 1,000 rows; --csv and --json print all"
    assert shown(COLUMNS, iter([])) == (None, "no rows (name, value)")


def test_json_is_one_object_with_words_for_what_is_not_finite() -> None:
    document = json.loads("".join(as_json(COLUMNS, ROWS)))
    assert document["version"] == 1
    assert document["columns"][1] == {"name": "value", "type": "DOUBLE"}
    assert document["rows"] == [["a\x1b[2J,b", 1.5], [None, "NaN"], ["c", "-Infinity"]]
    assert json.loads("".join(as_json(COLUMNS, [])))["rows"] == []


def test_csv_is_read_back() -> None:
    out = io.StringIO()
    write_csv(COLUMNS, ROWS, out)
    assert list(csv.reader(io.StringIO(out.getvalue()))) == [
        ["name", "value"],
        ["a\x1b[2J,b", "1.5"],
        ["", "NaN"],
        ["c", "-Infinity"],
    ]


def test_csv_on_a_terminal_does_not_steer_it() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    write_csv(COLUMNS, ROWS, out)
    assert "\x1b" not in out.getvalue()
    assert "[2J,b" in out.getvalue()
