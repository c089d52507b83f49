"""Where something stands in a YAML source."""

from __future__ import annotations

from typing import NamedTuple

import yaml


class Position(NamedTuple):
    """A place in a source: line and column count characters from 1."""

    line: int
    column: int


def start_of(event: yaml.Event) -> Position:
    """Where what an event tells of begins."""
    mark = event.start_mark
    return Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)


def last_line_of(event: yaml.Event) -> int | None:
    """The last line of what an event tells of; None for the end of a block.

    That stands, without any width, where the next value begins.
    """
    start, end = event.start_mark, event.end_mark
    if start is None or end is None:
        return None
    if (start.line, start.column) == (end.line, end.column):
        return None
    # A text in several lines ends at the begin of the line after them.
    return int(end.line + (end.column > 0))


def place_in(text: str, index: int) -> Position:
    """The place of a character."""
    before = text[:index].replace("\r\n", "\n").replace("\r", "\n")
    return Position(before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def allowed(char: str) -> bool:
    """YAML's printable characters (YAML 1.2, production c-printable), without NEL."""
    code = ord(char)
    return (
        char in "\t\n\r"
        or 0x20 <= code <= 0x7E
        or 0xA0 <= code <= 0xD7FF
        or 0xE000 <= code <= 0xFFFD
        or code >= 0x10000
    )
