"""Files of /proc and /sys: kept open, read whole from their start, again and again.

Opening such a file costs several times as much as reading it. A file of a process that was kept
open never becomes one of another process that got its number: reading it fails once it has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
"""Where `proc`, `sys` and `dev` are looked for; tests give a folder of their own."""


class ProcFile:
    """One file; it need not be there."""

    __slots__ = ("_fd", "_keep", "_path", "_records", "_size")

    def __init__(
        self, path: Path | str, *, size: int = 4096, records: bool = False, keep: bool = True
    ) -> None:
        """Nothing is opened yet.

        Args:
            path: of the file.
            size: bytes that one call asks for; more than the file holds, most times.
            records: the kernel hands it out in pieces of about a page, however much is asked for.
            keep: whether it stays open between readings.
        """
        self._path = str(path)
        self._size = size
        self._records = records
        self._keep = keep
        self._fd = -1

    def read(self) -> bytes | None:
        """Its text now; None if it is not there, cannot be read, or its process ended."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.pread(self._fd, self._size, 0)
            if self._records or len(found) == self._size:
                while more := os.pread(self._fd, self._size, len(found)):
                    found += more
        except OSError:
            self.close()
            return None
        if not self._keep:
            self.close()
        return found

    def number(self) -> int | None:
        """The whole number that it holds; None if there is none."""
        found = self.read()
        if found is None:
            return None
        try:
            return int(found)
        except ValueError:
            return None

    def close(self) -> None:
        """Close it; the next reading opens it anew."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError:
                return

    def __del__(self) -> None:
        self.close()


def named_numbers(text: bytes) -> dict[bytes, int]:
    """Lines of `name number`, as in a control group's `cpu.stat`; others are left out."""
    found: dict[bytes, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found
