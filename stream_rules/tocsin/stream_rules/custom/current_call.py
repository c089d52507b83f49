"""Which rule is being called, in a page of memory that the worker and its child share.

The child writes it before and after each call (a microsecond); the worker reads it to see a call
that does not end, and after its end to know in which call it came.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

SIZE: Final = 4096
_NUMBER: Final = struct.Struct("<Q")
_BODY: Final = struct.Struct("<QqIHH")
_TEXT: Final = SIZE - _BODY.size


@dataclass(frozen=True, slots=True)
class Mark:
    """A call under way: the `number`-th, of `rule` in `run_id`, after the record at `offset`."""

    number: int
    rule: str
    run_id: str
    partition: int
    offset: int


class Marker:
    """The shared page. One process writes, the other reads."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._number = 0

    def start(self, rule: bytes, run: bytes, partition: int, offset: int) -> None:
        """A call begins."""
        names = (rule + run)[:_TEXT]
        self._map[_BODY.size : _BODY.size + len(names)] = names
        self._number += 1
        _BODY.pack_into(self._map, 0, self._number, offset, partition, len(rule), len(run))

    def end(self) -> None:
        """Mark the call as ended."""
        self._number += 1
        _NUMBER.pack_into(self._map, 0, self._number)

    @contextmanager
    def loading(self, rule: str) -> Iterator[None]:
        """The code of a rule is loaded meanwhile."""
        self.start(rule.encode(), b"", 0, -1)
        try:
            yield
        finally:
            self.end()

    def read(self) -> Mark | None:
        """The call under way; None: there is none."""
        number, offset, partition, rule, run = _BODY.unpack_from(self._map, 0)
        if number % 2 == 0:
            return None
        names = self._map[_BODY.size : _BODY.size + rule + run]
        return Mark(
            number,
            names[:rule].decode(errors="replace"),
            names[rule:].decode(errors="replace"),
            partition,
            offset,
        )

    def close(self) -> None:
        """Let go of the page."""
        self._map.close()


def new_page() -> int:
    """A descriptor of a zeroed page without a name; the caller closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())
