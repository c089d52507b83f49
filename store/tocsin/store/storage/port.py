"""The port to what keeps a store's files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tocsin.store.errors import StoreError


class Overtaken(StoreError):
    """Somebody else has written the file meanwhile."""


@dataclass(frozen=True, slots=True)
class Content:
    """A small file as it was read; `version` is what `replace` compares."""

    data: bytes
    version: str


class Storage(Protocol):
    """Keeps files by relative paths with `/`. All methods block; each is safe from any thread.

    All raise StoreUnavailable: the disk is full, the bucket does not answer.
    """

    @property
    def url(self) -> str:
        """Where it is, for people, without secrets."""
        ...

    def read(self, path: str) -> Content | None:
        """A small file; None if it is not there."""
        ...

    def replace(self, path: str, data: bytes, *, expected: str | None) -> str:
        """Write a small file whole, or not at all; its new version. It survives a crash then.

        Raises:
            Overtaken: it is not of the version `expected` (None: not there).
        """
        ...

    def scratch(self) -> Path:
        """A folder of this machine for files that `move_in` takes."""
        ...

    def move_in(self, path: str, made: Path) -> None:
        """Take a file of `scratch`, which is there whole and survives a crash when this returns."""
        ...

    def local(self, path: str) -> Path:
        """The path of a file on this machine, fetched if need be; it is never changed.

        Raises:
            FileNotFoundError: it is not there (any more).
        """
        ...

    def folders(self, path: str = "") -> Sequence[str]:
        """The names of what has files below it in a folder; empty if there is none."""
        ...

    def files(self, path: str) -> Sequence[str]:
        """The paths of all files below a folder."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are not there are deleted already."""
        ...

    def discard(self, path: str, *, expected: str) -> None:
        """Delete a small file if it is of that version still, and leave another one alone."""
        ...

    def tidy(self, now_s: float) -> None:
        """Delete what processes that have crashed left in `scratch`. Raises nothing.

        Args:
            now_s: Unix seconds.
        """
        ...
