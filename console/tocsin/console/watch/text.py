"""Lines of styled text of a known width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size


class Piece(NamedTuple):
    """Some text of a line, in one style of rich."""

    text: str
    style: str = ""


Line = tuple[Piece, ...]


def cut(line: Line, width: int) -> Line:
    """The line in at most `width` cells, with a mark where something was cut off."""
    found: list[Piece] = []
    room = width
    for i, piece in enumerate(line):
        size = cell_len(piece.text)
        more = size > room or (size == room and any(later.text for later in line[i + 1 :]))
        if more:
            if room > 0 and piece.text[:room].strip():
                text = set_cell_size(piece.text, room - 1).rstrip() + "…"
                found.append(Piece(text, piece.style))
            break
        found.append(piece)
        room -= size
    return tuple(found)


def squeezed(text: str, width: int) -> str:
    """The text in at most `width` cells without its middle: names of runs differ at their ends."""
    if cell_len(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    return set_cell_size(text, max(0, width - tail - 1)) + "…" + text[len(text) - tail :]


def fields(rows: Sequence[Sequence[Piece]], widths: Sequence[int]) -> list[Line]:
    """The rows with their columns aligned, each as wide as its widest text, at most its width.

    Columns that are empty in all rows are left out. The last column is not padded.
    """
    used = [
        min(width, max((cell_len(row[i].text) for row in rows), default=0))
        for i, width in enumerate(widths)
    ]
    after = [any(used[i + 1 :]) for i in range(len(used))]
    lines = []
    for row in rows:
        line: list[Piece] = []
        for i, (piece, width) in enumerate(zip(row, used, strict=True)):
            if width:
                (shown,) = cut((piece,), width) or (Piece(""),)
                text = set_cell_size(shown.text, width) + "  " if after[i] else shown.text
                line.append(Piece(text, piece.style))
        lines.append(tuple(line))
    return lines
