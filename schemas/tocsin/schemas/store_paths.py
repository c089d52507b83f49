"""Where the store keeps what belongs to a run: names as parts of paths. Pure."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote, unquote

_MAX_NAME: Final = 180

TENSORS: Final = "tensors"
"""The folder of tensors that were saved in full, in that of their run."""


def quoted(name: str) -> str:
    """A name as a part of a path: letters, digits, `.` and `-` stay, all else is `%XX`, so that no
    name leaves its folder. One that would be too long for a file system ends in `~` and a digest.
    """
    text = quote(name, safe="").replace("_", "%5F").replace("~", "%7E")
    if len(text) <= _MAX_NAME:
        return text
    return f"{text[:100].rpartition('%')[0]}~{hashlib.sha256(name.encode()).hexdigest()}"


def run_folder(run_id: str) -> str:
    """The folder of a run."""
    return f"run={quoted(run_id)}"


def run_of(folder: str) -> str | None:
    """The run whose folder that is; None: no folder of a run, or its name was too long for one."""
    word, _, name = folder.partition("=")
    return unquote(name) if word == "run" and "~" not in name else None


def tensors_path(run_id: str, incarnation: str, collection: str, *, step: int, rank: int) -> str:
    """The file of the tensors of one collection that a rank has saved at a step."""
    return (
        f"{run_folder(run_id)}/{TENSORS}/incarnation={quoted(incarnation)}/"
        f"{quoted(collection)}-step{step}-rank{rank}.safetensors"
    )
