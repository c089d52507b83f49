"""Keeps the last good checkpoint of a run where the rotation of the job does not delete it.

It gets a second name, or a copy, in the folder `tocsin-pinned` beside it. Blocks; for a thread of
the launcher or the listener, never of the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
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
    nothing. A name of another checkpoint stays, and this one gets a number. Several processes may
    pin one, as the launchers of all nodes do on a shared file system. Blocks: a copy takes as long
    as the checkpoint is large.

    Raises OSError: it is gone, the file system has no hard links, there is no space.
    """
    folder = path.parent / FOLDER
    folder.mkdir(exist_ok=True)
    facts = _facts(path)
    for number in range(100):
        target = folder / (path.name if number == 0 else f"{path.name}.{number}")
        if not target.exists():
            break
        if _holds(target, facts):
            return target
    copy = os.link if how == "hard_link" else shutil.copy2
    # Not under its own name before it is whole, and in a folder that is nobody else's.
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", suffix=_PART, dir=folder, ignore_cleanup_errors=True
    ) as own:
        part = Path(own) / target.name
        if path.is_dir():
            shutil.copytree(path, part, copy_function=copy)
        else:
            copy(path, part)
        if not _holds(part, facts):
            raise OSError(f"{path} has changed while it was pinned")
        try:
            part.rename(target)
        except OSError:
            # Another process may have pinned it meanwhile.
            if not _holds(target, facts):
                raise
    return target


_Facts = Mapping[Path, tuple[int, int]]


def _facts(path: Path) -> _Facts:
    """Size and time of each file of a checkpoint, by its place in it. Raises OSError."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    if not files:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return {file.relative_to(path): _size_and_time(file) for file in files}


def _holds(target: Path, facts: _Facts) -> bool:
    """Whether `target` is the pin of such a checkpoint: each file is of its size and time."""
    try:
        return all(_size_and_time(target / place) == fact for place, fact in facts.items())
    except OSError:
        return False


def _size_and_time(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


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
