"""The private folders of this node that the processes of a job meet in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tocsin.schemas.process.private_folders import SHARED, make_private, user_folder

_MAX_ADDRESS: Final = 107


_ROOM_FOR_NAME: Final = 32


def private_folder(environ: Mapping[str, str]) -> Path:
    """`${XDG_RUNTIME_DIR:-/tmp}/tocsin-UID`, made if needed, usable by its user alone.

    Where neither can be used, or the path leaves no room for a socket's name, it is a fresh
    temporary folder.

    Raises:
        OSError: no folder can be made.
    """
    folder = user_folder(environ, longest=_MAX_ADDRESS - _ROOM_FOR_NAME)
    if folder is not None:
        # Somebody may have been faster.
        with contextlib.suppress(OSError):
            return make_private(folder)
    return Path(tempfile.mkdtemp(prefix="tocsin-", dir=SHARED))


def job_folder(environ: Mapping[str, str]) -> Path:
    """A fresh folder `j-XXXX` for one job, 0700. Raises OSError."""
    parent = private_folder(environ)
    while True:
        folder = parent / f"j-{os.urandom(4).hex()}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder


def shared_job_folder(environ: Mapping[str, str], job_id: str) -> Path:
    """The folder that all processes of a job on this node find by themselves. Raises OSError."""
    digest = hashlib.sha256(job_id.encode()).hexdigest()[:8]
    return make_private(private_folder(environ) / f"s-{digest}")


def remove_folder(folder: Path) -> None:
    """Take a job's folder away with all that is in it; what cannot be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)
