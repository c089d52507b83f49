"""A checkpoint noticed: which file or folder was written, and where it is under its final name."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import clip

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

MAX_FILES: Final = 1000
"""Files of a folder whose sizes are added up; of a larger one the size is not reported."""

MAX_WRITTEN: Final = 100
"""Files and folders that wait for the end of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file or folder right after it was written. `step` is the last step that is in it.

    `size_bytes` is a file's; that of a folder is found out once, under its final name.
    """

    path: Path
    device: int
    inode: int
    size_bytes: int | None
    step: int
    duration_s: float
    finite: bool | None


class CheckpointFiles(Probe):
    """The checkpoints of one training that are not reported yet: at the end of the step they have
    their final names.
    """

    name = "checkpoints"

    def __init__(self) -> None:
        self._training: Training | None = None
        self._written: deque[Written] = deque(maxlen=MAX_WRITTEN)

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self._training = training

    def wrote(
        self,
        training: Training,
        target: object,
        step: int | None,
        duration_s: float,
        *,
        finite: bool | None,
    ) -> None:
        """That training has written something; `step` is the last one when that began. A write that
        ends after its training counts for no other one. For any thread.
        """
        path = target_path(target)
        if path is None or step is None or training is not self._training:
            return
        written = inspect(path, step=step, duration_s=duration_s, finite=finite)
        if written is not None:
            self._written.append(written)
            self.wakes = 0

    def stepped(self, training: Training, step: int) -> None:
        """A step of the training is over, and is `wakes` or a later one."""
        self.wakes = NEVER
        self._report(training)

    def close(self, training: Training) -> None:
        """The training is over: send what is left."""
        self._report(training)

    def reset(self) -> None:
        """Back to what it was before `start`: another training may begin."""
        self._training = None
        self._written.clear()
        self.wakes = NEVER

    def _report(self, training: Training) -> None:
        while self._written:
            written = self._written.popleft()
            # One rank is enough to go through a folder that all have written to.
            path, size = final_path(written, add_up=training.identity.rank == 0)
            checkpoint = Checkpoint(
                path=clip(str(path)), step=written.step, size_bytes=size, finite=written.finite
            )
            training.saved(checkpoint, written.duration_s)


def target_path(target: object) -> Path | None:
    """What a call that saves to `target` writes; None for a buffer or a pipe."""
    if isinstance(target, str | os.PathLike):
        name = os.fspath(target)
    else:
        name = getattr(target, "name", None)
    return Path(name).absolute() if isinstance(name, str) else None


def inspect(path: Path, *, step: int, duration_s: float, finite: bool | None) -> Written | None:
    """What was written; None if it is no regular file and no folder."""
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return None
    return Written(
        path=path,
        device=found.st_dev,
        inode=found.st_ino,
        size_bytes=found.st_size if stat.S_ISREG(found.st_mode) else None,
        step=step,
        duration_s=duration_s,
        finite=finite,
    )


def _size(path: Path, found: os.stat_result, *, add_up: bool) -> int | None:
    if not stat.S_ISDIR(found.st_mode):
        return found.st_size
    if not add_up:
        return None
    total, files = 0, 0
    for folder, _, names in os.walk(path):
        for name in names:
            files += 1
            if files > MAX_FILES:
                return None
            # Temporary files may be gone by now.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def final_path(written: Written, *, add_up: bool = True) -> tuple[Path, int | None]:
    """Where the file or folder is now, and its size in bytes; a folder's only to `add_up`.

    Careful programs write to a temporary name and rename: then it is found by its inode in the
    same folder. What cannot be found keeps the name under which it was written.
    """
    try:
        now = written.path.stat()
        if (now.st_dev, now.st_ino) == (written.device, written.inode):
            return written.path, _size(written.path, now, add_up=add_up)
    except OSError:
        pass
    try:
        with os.scandir(written.path.parent) as entries:
            for entry in entries:
                if entry.inode() == written.inode and not entry.is_symlink():
                    path = Path(entry.path)
                    return path, _size(path, entry.stat(), add_up=add_up)
    except OSError:
        pass
    return written.path, written.size_bytes
