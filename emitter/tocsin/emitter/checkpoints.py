"""`torch.save` noticed: which file was written, and where it is once it has its final name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file as it was right after `torch.save`. `step` is the last step that is in it."""

    path: Path
    device: int
    inode: int
    size_bytes: int
    step: int
    duration_s: float
    finite: bool | None


def target_path(target: object) -> Path | None:
    """The file that `torch.save(…, target)` writes; None for a buffer or a pipe."""
    if isinstance(target, str | os.PathLike):
        name = os.fspath(target)
    else:
        name = getattr(target, "name", None)
    return Path(name).absolute() if isinstance(name, str) else None


def look(path: Path, *, step: int, duration_s: float, finite: bool | None) -> Written | None:
    """What was written; None if it is not a regular file."""
    try:
        found = path.stat()
    except OSError:
        return None
    if not path.is_file():
        return None
    return Written(
        path=path,
        device=found.st_dev,
        inode=found.st_ino,
        size_bytes=found.st_size,
        step=step,
        duration_s=duration_s,
        finite=finite,
    )


def final_path(written: Written) -> tuple[Path, int]:
    """Where the file is now, and its size in bytes.

    Careful programs write to a temporary name and rename: then it is found by its inode in the
    same folder. A file that cannot be found keeps the name under which it was written.
    """
    try:
        now = written.path.stat()
        if (now.st_dev, now.st_ino) == (written.device, written.inode):
            return written.path, now.st_size
    except OSError:
        pass
    try:
        with os.scandir(written.path.parent) as entries:
            for entry in entries:
                if entry.inode() == written.inode and entry.is_file(follow_symlinks=False):
                    return Path(entry.path), entry.stat().st_size
    except OSError:
        pass
    return written.path, written.size_bytes
