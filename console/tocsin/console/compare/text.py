"""A comparison for the terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tocsin.console.charts import value_text
from tocsin.console.compare.comparison import Comparison, change_text, method_line
from tocsin.schemas.text import plain_line

_MAX_ROWS: Final = 30


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The verdict first, then tables, then the conditions."""
    console.print(Text(plain_line(comparison.verdict)), soft_wrap=True)
    names = (plain_line(comparison.first), plain_line(comparison.second))
    if comparison.differences:
        table = _table("differs", "what", "step", *names)
        for one in comparison.differences[:_MAX_ROWS]:
            step = "" if one.step is None else f"{one.step:,}"
            table.add_row(one.kind, Text(one.what), step, Text(one.first), Text(one.second))
        console.print()
        console.print(table)
        if len(comparison.differences) > _MAX_ROWS:
            console.print(f"and {len(comparison.differences) - _MAX_ROWS:,} more (--json)")
    if comparison.measures:
        table = _table("measure", *names, "change", "values")
        for measured in comparison.measures:
            change = measured.change
            cells = ["", ""]
            counts = ""
            if change is not None:
                unit = measured.unit
                cells = [value_text(change.first, unit), value_text(change.second, unit)]
                counts = " and ".join(f"{n:,}" for n in change.values) if measured.tested else ""
            table.add_row(measured.name, *cells, Text(change_text(measured)), counts)
        console.print()
        console.print(table)
        if line := method_line(comparison.measures):
            console.print(Text(line, style="dim"), soft_wrap=True)
    for judged in comparison.conditions:
        word, style = ("FAILS", "bold red") if judged.holds else ("passes", "green")
        if judged.undecided:
            word, style = "undecided", "yellow"
        result = f"  {judged.condition.text}: {judged.undecided or change_text(judged.measured)}"
        console.print(Text.assemble((word, style), result), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    return table
