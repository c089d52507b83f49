"""Who samples a node for a run: exactly one of the processes there that could, by a file lock.

A lock of the kernel (`flock`) goes with its process, however that ends, and another takes it. It
belongs to the open file, which a forked child shares: the child lets go of its copy at once, or a
data loader's worker would hold the lock of a training that was killed.

The file is taken away by whoever held the lock, so one that is locked may be a file that has no
name any more: such a lock does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import Final

_TRIES: Final = 8


class NodeLock:
    """One lock by the name of its file."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._fd >= 0

    def acquire(self) -> bool:
        """Take it, if nobody else has it; does not wait.

        Raises:
            OSError: the folder is not there any more, or its file system has no locks.
        """
        if self.held:
            return True
        for _ in range(_TRIES):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                there = os.stat(self.path)
            except BlockingIOError:
                os.close(fd)
                return False
            except FileNotFoundError:
                os.close(fd)
                continue
            except OSError:
                os.close(fd)
                raise
            if os.path.samestat(os.fstat(fd), there):
                self._fd = fd
                _HELD.add(self)
                return True
            os.close(fd)
        return False

    def is_taken(self) -> bool:
        """Whether anybody has it: this process, too. Raises OSError."""
        if self.held:
            return True
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        """Let it go, and take the file away; a second time does nothing."""
        if not self.held:
            return
        fd, self._fd = self._fd, -1
        _HELD.discard(self)
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(fd)

    def _drop(self) -> None:
        """In a forked child: the parent's lock stays."""
        if self.held:
            fd, self._fd = self._fd, -1
            os.close(fd)


_HELD: Final[weakref.WeakSet[NodeLock]] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_HELD):
        lock._drop()
    _HELD.clear()


os.register_at_fork(after_in_child=_drop_all)
