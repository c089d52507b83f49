"""A file that a person has named, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the path to write to, which becomes `path` at the end, or is removed after an error.

    A link stays, and what it leads to is replaced. A device or a pipe is written to as it is.
    Raises OSError.
    """
    if path.exists() and not path.is_file():
        # Before links are resolved: /dev/stdout leads to a pipe that has no path.
        yield path
        return
    path = Path(os.path.realpath(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
