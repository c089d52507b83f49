"""Lines on stderr, where a person reads them."""

from __future__ import annotations

import sys


def print_line(text: str) -> None:
    """One line on stderr, if there is one."""
    try:
        print(f"tocsin: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, gone, or None
        return
