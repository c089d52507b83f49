"""Lines of styled text in columns, and names that are too long.

Not a `Table` of rich: that takes three times as long, several times a second beside a training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

GAP: Final = 2
"""Cells between two columns."""


def grid(
    rows: Sequence[Sequence[Text]], widths: Sequence[int], right: Collection[int] = ()
) -> list[Text]:
    """The rows as lines with their columns aligned, those of `right` to the right.

    A column is as wide as its widest text, at most its width; one that is empty in all rows is left
    out.
    """
    used = [
        min(width, max((row[i].cell_len for row in rows), default=0))
        for i, width in enumerate(widths)
    ]
    lines = []
    for row in rows:
        line = Text()
        for i, (cell, width) in enumerate(zip(row, used, strict=True)):
            if width:
                cell.truncate(width, overflow="ellipsis")
                gap = " " * (width - cell.cell_len)
                line.append(gap if i in right else "").append_text(cell)
                line.append(" " * GAP if i in right else gap + " " * GAP)
        line.rstrip()
        lines.append(line)
    return lines


def squeezed(text: str, width: int) -> str:
    """The text in at most `width` cells without its middle: names of runs differ at their ends."""
    if cell_len(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    return set_cell_size(text, max(0, width - tail - 1)) + "…" + text[len(text) - tail :]
