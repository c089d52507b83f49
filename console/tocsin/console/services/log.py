"""The log of commands that run until a signal ends them: on stderr, one line each."""

from __future__ import annotations

import logging
import os
import sys

from tocsin.schemas.errors import ConfigurationError


def log_to_stderr() -> None:
    """Begin it, at the level that TOCSIN_LOG names. Raises ConfigurationError."""
    level = os.environ.get("TOCSIN_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigurationError(f"TOCSIN_LOG {level}: expected DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def print_error(error: Exception) -> None:
    """Print its message on stderr, each line with `tocsin:` before it."""
    for line in str(error).splitlines():
        print(f"tocsin: {line}", file=sys.stderr)
