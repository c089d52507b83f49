"""Keeps the last good checkpoint of a run where the rotation of the job does not delete it.

It gets a second name, or a copy, in the folder `tocsin-pinned` beside it. Blocks; for a thread of
the launcher or the listener, never of the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointPinned
from tocsin.schemas.records.events import Data, clip

How = Literal["hard_link", "copy"]

PIN: Final = "TOCSIN_STOP_PIN"
"""Variable: how to pin, for who listens without a launcher."""

FOLDER: Final = "tocsin-pinned"

_PART: Final = ".part"


def how_to_pin(environ: Mapping[str, str]) -> How | None:
    """What `start()` has left in the environment; None: nothing is pinned."""
    match environ.get(PIN):
        case "hard_link":
            return "hard_link"
        case "copy":
            return "copy"
        case _:
            return None


def pin(path: Path, how: How) -> Path:
    """Give a checkpoint, a file or a folder, its second name; that name. A second time does
    nothing. A name of another checkpoint stays, and this one gets a number. Blocks: a copy takes as
    long as the checkpoint is large.

    Raises OSError: it is gone, the file system has no hard links, there is no space.
    """
    folder = path.parent / FOLDER
    folder.mkdir(exist_ok=True)
    for number in range(100):
        target = folder / (path.name if number == 0 else f"{path.name}.{number}")
        if not target.exists():
            break
        if _same(path, target):
            return target
    # Not under its own name before it is whole.
    part = folder / f".{target.name}{_PART}"
    _remove(part)
    copy = os.link if how == "hard_link" else shutil.copy2
    try:
        if path.is_dir():
            shutil.copytree(path, part, copy_function=copy)
        else:
            copy(path, part)
        part.rename(target)
    except (OSError, shutil.Error):
        _remove(part)
        raise
    return target


def _same(path: Path, target: Path) -> bool:
    """Whether `target` is the pin of `path`: each file is the same, or of its size and time."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        other = target if file is path else target / file.relative_to(path)
        try:
            mine, pinned = file.stat(), other.stat()
        except OSError:
            return False
        if (mine.st_size, mine.st_mtime_ns) != (pinned.st_size, pinned.st_mtime_ns):
            return False
    return bool(files)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


class Pins:
    """Pins what it is asked to, once each, and publishes what came of it. On one event loop."""

    def __init__(self, run_id: str, how: How | None, publish: Callable[[Data], object]) -> None:
        """`how` None: nothing is pinned."""
        self._run_id = run_id
        self._how = how
        self._publish = publish
        self._known: set[tuple[str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, checkpoint: Checkpoint | None, incarnation: str) -> None:
        """Pin it, in a thread; never waits. Nothing if it is relative, or known."""
        if self._how is None or checkpoint is None or not os.path.isabs(checkpoint.path):
            return
        key = (checkpoint.path, checkpoint.step)
        if key in self._known:
            return
        self._known.add(key)
        task = asyncio.create_task(self._pin(self._how, checkpoint, incarnation), name="pin")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self, timeout_s: float) -> bool:
        """Wait for what is under way, for at most so long; whether all is done."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    async def _pin(self, how: How, checkpoint: Checkpoint, incarnation: str) -> None:
        pinned, reason = "", ""
        try:
            pinned = str(await asyncio.to_thread(_niced, Path(checkpoint.path), how))
        except (OSError, shutil.Error) as error:
            reason = str(error)
        self._publish(
            CheckpointPinned(
                run_id=self._run_id,
                incarnation=incarnation,
                checkpoint=checkpoint,
                how=how,
                pinned=clip(pinned),
                reason=clip(reason, 500),
            )
        )


def _niced(path: Path, how: How) -> Path:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    return pin(path, how)
