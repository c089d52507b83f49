"""Names of statistics as names of columns: SQL takes `Loss` and `loss` for one. Pure."""

from __future__ import annotations

import re
from typing import Final

RESERVED: Final = frozenset(
    {"bus_offset", "append_ms", "at_us", "step", "rank", "mode", "every", "place", "tensor"}
    | {"run", "incarnation", "collection", "filename"}
)
"""Columns of each table of tensors, and names that are in the path of a file."""

_PLAIN: Final = re.compile(r"[a-z0-9_.#-]")


def column_of(statistic: str) -> str:
    """The column of a statistic: itself, where that is unambiguous."""
    if statistic in RESERVED:
        return f"%{ord(statistic[0]):02x}{statistic[1:]}"
    return "".join(one if _PLAIN.fullmatch(one) else _escaped(one) for one in statistic) or "%"


def identifier(column: str) -> str:
    """A column in SQL."""
    return '"' + column.replace('"', '""') + '"'


def _escaped(one: str) -> str:
    return "".join(f"%{byte:02x}" for byte in one.encode("utf-8", "replace"))
