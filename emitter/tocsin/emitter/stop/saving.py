"""Checkpoints that are written while a stop comes, and those that a stop asks for.

The hooks report when a write begins and ends to who listens on this node, so that the job gets its
grace once more instead of a signal in the middle of a write. A stop that asks for a checkpoint
calls what the program or a framework has registered here (`on_stop`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tocsin.emitter.process.isolation import from_signal
from tocsin.emitter.stop import datagrams

if TYPE_CHECKING:
    from tocsin.schemas.records.stops.commands import StopRequested

logger = logging.getLogger(__name__)

Saver = Callable[[], object]
"""Writes a checkpoint, on the training's thread; returns its path, if it likes."""

Decision = Literal["saved", "protected", "skipped", "not_saved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What became of the checkpoint of a stop, and why."""

    decision: Decision
    path: str = ""
    reason: str = ""


class Writes:
    """The writes of this process that are under way. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._none = threading.Event()
        self._none.set()
        self.ended = 0
        """Writes that have ended so far."""
        self.path = ""
        """What was written last."""

    def start(self) -> None:
        """A write begins."""
        with self._lock:
            self._count += 1
            self._none.clear()
            first = self._count == 1
        if first:
            _report(on=True)

    def end(self, path: str = "") -> None:
        """A write has ended; `path` is empty if it has failed, or went somewhere else."""
        with self._lock:
            self._count = max(0, self._count - 1)
            last = self._count == 0
            if path:
                self.ended, self.path = self.ended + 1, path
            if last:
                self._none.set()
        if last:
            _report(on=False)

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is under way, for at most so long; whether none is."""
        return self._none.wait(max(0.0, timeout_s))


writes = Writes()
"""Those of this process."""

_saver: Saver | None = None
_framework_saver: Saver | None = None


def on_stop(saver: Saver | None) -> None:
    """From now on a stop that asks for a checkpoint calls `saver`; with None it has none."""
    global _saver
    _saver = saver


def framework_saves(saver: Saver | None) -> None:
    """From now on `saver`, a framework's, is called where the program has registered none; with
    None there is none.
    """
    global _framework_saver
    _framework_saver = saver


def save() -> Choice:
    """Write a checkpoint the way that was registered. Raises nothing but a signal's exception."""
    saver = _saver or _framework_saver
    if saver is None:
        return Choice(decision="not_saved", reason="the program has not said how to save")
    before = writes.ended
    writes.start()
    try:
        returned = saver()
    except Exception as error:
        # An emitter hook's isolation: the stop comes through without a checkpoint.
        if from_signal(error):
            raise
        logger.warning("the checkpoint of the stop was not saved", exc_info=True)
        return Choice(decision="not_saved", reason=f"saving failed: {type(error).__name__}")
    finally:
        writes.end()
    path = os.fspath(returned) if isinstance(returned, str | os.PathLike) else ""
    if not path and writes.ended > before:
        path = writes.path
    return Choice(decision="saved", path=str(path))


def kept(command: StopRequested | None, why: str = "") -> Choice:
    """The choice where nothing is saved; `why` not, if it was asked for."""
    if command is not None and command.checkpoint == "skip":
        return Choice(decision="skipped")
    if command is None or command.last_good_checkpoint is None:
        known = "no checkpoint from before is known"
        return Choice(decision="not_saved", reason=f"{why}; {known}" if why else known)
    return Choice(decision="protected", path=command.last_good_checkpoint.path, reason=why)


def kept_until_command(policy: str, why: str = "") -> Choice:
    """The choice where nothing is saved and the command is still to come, which names what is
    protected; `why` nothing is saved, if that was asked for.
    """
    return Choice(decision="skipped" if policy == "skip" else "protected", reason=why)


def framework_choice(before: int) -> Choice:
    """The choice where a framework was to save at the end of its loop; it had written `before`
    times then."""
    if writes.ended == before:
        return Choice(decision="not_saved", reason="the framework has saved nothing")
    return Choice(decision="saved", path=writes.path)


def _report(*, on: bool) -> None:
    launcher = os.environ.get("TOCSIN_LAUNCHER")
    if launcher:
        datagrams.send(launcher, {"kind": "saving", "pid": os.getpid(), "on": on})


def _in_child() -> None:
    global writes
    writes = Writes()


os.register_at_fork(after_in_child=_in_child)
