"""Standard output, as the commands that print tables use it."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_UNBOUNDED: Final = 10_000


def standard_output() -> Console:
    """With colour on a terminal; where it is none, lines are as long as they are, for `grep`."""
    return Console(width=None if sys.stdout.isatty() else _UNBOUNDED)
