"""Files that a person has named for what a command is to write."""

from __future__ import annotations

import os
from pathlib import Path

from tocsin.schemas.errors import ConfigurationError


def check_writable(path: Path | None, option: str, example: str) -> None:
    """Whether a file can be written later.

    Raises:
        ConfigurationError: it cannot; the message names the option.
    """
    if path is None:
        return
    if path.exists() and not path.is_file() and not path.is_dir() and os.access(path, os.W_OK):
        return  # a device or a pipe
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"{option} {path}: no folder {folder}: create it, or name another file"
        )
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"{option} {path}: expected a file that can be written, like {example}"
        )
