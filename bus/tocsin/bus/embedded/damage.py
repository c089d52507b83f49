"""What becomes of a bus file that is damaged: it is set aside, whole, and a new one begins."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

KEPT: Final = 3
"""Files set aside beside one bus. One more, and it is the disk that has to be looked at."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite has found that a file is not what it was written as."""
    name: str = getattr(error, "sqlite_errorname", None) or ""
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def set_aside(path: Path, error: sqlite3.Error) -> bool:
    """Rename the file and its log, and report that; False: there are `KEPT` of them already.

    To be called by one process at a time. Those who have the file open go on with the next one,
    as after it was deleted.
    """
    places = (path.with_name(f"{path.name}.damaged-{nth}") for nth in range(1, KEPT + 1))
    place = next((place for place in places if not place.exists()), None)
    if place is None:
        return False
    path.rename(place)
    with suppress(FileNotFoundError):
        path.with_name(f"{path.name}-wal").rename(place.with_name(f"{place.name}-wal"))
    # Made anew by whoever opens the file.
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    logger.error(
        "%s is damaged (%s): set aside as %s; a new bus begins, and the rules start without their "
        "state. 'sqlite3 %s .recover' may read what it held",
        path,
        error,
        place.name,
        place.name,
        extra={"action": "bus"},
    )
    return True
