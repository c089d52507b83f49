"""SQLite's errors as the port's, grouped by what the caller does about them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from tocsin.bus.embedded.damage import is_damage
from tocsin.bus.port import BusUnavailable, UnusableBus

_BUSY: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")
_DENIED: Final = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite raises about that file in the body into the port's errors."""
    try:
        yield
    except sqlite3.Error as error:
        _raise_translated(path, error)
    except OSError as error:
        raise BusUnavailable(f"{path}: {error.strerror or error}") from error


def _raise_translated(path: Path, error: sqlite3.Error) -> NoReturn:
    name: str = getattr(error, "sqlite_errorname", None) or ""
    if is_damage(error):
        raise UnusableBus(
            f"{path} is damaged or is not an SQLite file ({error}); it is left as it is: "
            "move it away to start a new bus, or try 'sqlite3 FILE .recover' on a copy"
        ) from error
    if name.startswith(_BUSY):
        raise BusUnavailable(f"{path} is locked by another process") from error
    if name == "SQLITE_FULL" or name.startswith("SQLITE_IOERR"):
        raise BusUnavailable(
            f"cannot write {path} ({error}): the disk is full or failing; free some space"
        ) from error
    if name.startswith(_DENIED) and name != "SQLITE_READONLY_DBMOVED":
        raise UnusableBus(
            f"cannot open {path} for writing ({error}): check the permissions"
        ) from error
    raise BusUnavailable(f"{path}: {error}") from error
