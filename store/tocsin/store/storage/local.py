"""A folder of this machine. A file is written under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tocsin.schemas.process.durable import sync
from tocsin.schemas.process.private_folders import make_private
from tocsin.store.errors import StoreUnavailable, UnusableStore
from tocsin.store.storage.port import Content, Overtaken

SCRATCH: Final = ".scratch"
"""For what is being written. What is left there by a crash is deleted later."""

LOCK: Final = ".lock"
_STALE_S: Final = 24 * 3600.0
_AWAY: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE}
)


class LocalStorage:
    """Files in a folder of this machine. The folder is made, private, with the first file."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = Path(os.path.abspath(folder))

    @property
    def url(self) -> str:
        """Where it is, for people, without secrets."""
        return str(self.folder)

    def read(self, path: str) -> Content | None:
        """A small file; None if it is not there."""
        with self._errors():
            try:
                data = (self.folder / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Content(data, _version(data))

    def replace(self, path: str, data: bytes, *, expected: str | None) -> str:
        """Write a small file whole, or not at all; its new version."""
        with self._errors(), self._locked(path):
            found = self.read(path)
            if (None if found is None else found.version) != expected:
                raise Overtaken(f"{self.folder / path} was written by somebody else")
            descriptor, name = tempfile.mkstemp(dir=self.scratch())
            with open(descriptor, "wb") as file:
                file.write(data)
            self.move_in(path, Path(name))
        return _version(data)

    def scratch(self) -> Path:
        """A folder of this machine for files that `move_in` takes."""
        folder = self.folder / SCRATCH
        if not folder.is_dir():
            with self._errors():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                make_private(folder)
        return folder

    def move_in(self, path: str, made: Path) -> None:
        """Take a file of `scratch`, which is there whole and survives a crash when this returns."""
        with self._errors():
            target = self._made(path)
            try:
                sync(made)
                made.replace(target)
            except OSError:
                made.unlink(missing_ok=True)
                raise
            sync(target.parent)

    def local(self, path: str) -> Path:
        """The path of a file on this machine, fetched if need be; it is never changed."""
        found = self.folder / path
        if not found.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(found))
        return found

    def folders(self, path: str = "") -> Sequence[str]:
        """The names of what has files below it in a folder; empty if there is none."""
        with self._errors():
            try:
                with os.scandir(self.folder / path) as entries:
                    return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def files(self, path: str) -> Sequence[str]:
        """The paths of all files below a folder."""
        found = []
        for folder, _, names in os.walk(self.folder / path):
            place = Path(folder).relative_to(self.folder)
            found += [(place / name).as_posix() for name in names if name != LOCK]
        return sorted(found)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are not there are deleted already. Folders that are empty then
        go, too."""
        with self._errors():
            for path in paths:
                target = self.folder / path
                target.unlink(missing_ok=True)
                self._remove_above(target)

    def discard(self, path: str, *, expected: str) -> None:
        """Delete a small file if it is of that version still, and leave another one alone. Folders
        that are empty then go, too."""
        with self._errors():
            target = self.folder / path
            if not target.exists():
                return
            with self._locked(path):
                found = self.read(path)
                if found is not None and found.version == expected:
                    target.unlink()
            self._remove_above(target)

    def tidy(self, now_s: float) -> None:
        """Delete what processes that have crashed left in `scratch`. What is there was left a day
        ago and earlier."""
        with contextlib.suppress(OSError), os.scandir(self.folder / SCRATCH) as entries:
            for entry in entries:
                if entry.stat().st_mtime >= now_s - _STALE_S:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)

    def _remove_above(self, target: Path) -> None:
        for folder in target.parents:
            if folder == self.folder or not _remove_empty(folder):
                break

    def _made(self, path: str) -> Path:
        target = self.folder / path
        if not target.parent.is_dir():
            self.scratch()
            target.parent.mkdir(parents=True, exist_ok=True)
            # A folder's name is an entry of the one above it.
            for folder in target.parent.parents:
                sync(folder)
                if folder == self.folder:
                    break
        return target

    @contextlib.contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        """Be alone with the files beside this one, in a folder that is there."""
        while True:
            try:
                lock = self._made(path).parent / LOCK
                descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # somebody has just deleted the folder, which was empty
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _is_at(descriptor, lock):
                    yield
                    return
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise UnusableStore(f"the store {self.folder} cannot be used: {error}") from error
        except OSError as error:
            if error.errno in _AWAY:
                raise StoreUnavailable(f"the store {self.folder} does not work: {error}") from error
            raise


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(folder: Path) -> bool:
    """Whether it is gone; a lock in it that nobody holds does not count."""
    try:
        names = os.listdir(folder)
        if names == [LOCK]:
            _remove_lock(folder)
        elif names:
            return False
        folder.rmdir()
    except OSError:
        return False
    return True


def _remove_lock(folder: Path) -> None:
    """Delete the lock of a folder that has nothing else. Raises OSError: it has, or is locked."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.listdir(folder) != [LOCK]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))
        (folder / LOCK).unlink()
    finally:
        os.close(descriptor)
