"""Reads one checkpoint and writes what it found to stdout, as one JSON object.

A process of its own, with the lowest priority: a file that makes it grow or crash costs nothing
but its own result.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.emitter.checkpoints.health import health

MAX_MEMORY: Final = 4 * 2**30
"""Address space of this process, bytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Read the checkpoint that is the one argument; 1 if that failed, with the reason as JSON."""
    (path,) = sys.argv[1:] if argv is None else argv
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    try:
        found = health(Path(path)).as_dict()
    except (OSError, MemoryError, RecursionError) as error:
        found = {"unread": str(error)[:500] or type(error).__name__}
    json.dump(found, sys.stdout)
    return 1 if "unread" in found else 0


if __name__ == "__main__":
    raise SystemExit(main())
