"""Takes the records of spools (`tocsin.bus.embedded.spool`) into an embedded bus.

Exactly once: the position in a segment is stored in the transaction that appends its records, and
each taking in begins with what is stored there. So it does not matter how many processes do this,
or when one is killed. One of them at a time has the turn, which is a file lock: only it is woken by
the doorbell; the others look once a second.

Records get the time at which they were written to the spool as their append time, as far as append
times do not fall within the partition. So those of a run that nobody watched are as old as they
are.

Like `tocsin.bus.embedded.log`, functions that block.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tocsin.bus.embedded.doorbell import Doorbell, topic_mask
from tocsin.bus.embedded.log import append_within
from tocsin.bus.embedded.spool import Entry, is_segment, parse, spool_folder
from tocsin.bus.embedded.tables import TopicCatalogue, add_topics, transaction
from tocsin.bus.port import UnknownTopic
from tocsin.schemas.errors import RecordTooLarge
from tocsin.schemas.process.private_folders import is_private, make_private

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Read and written in one transaction at most; more than the longest entry."""

_TURN: Final = "turn"


class Intake:
    """Takes in what is beside one bus file. Several threads may use it at once."""

    def __init__(self, path: Path, doorbell: Doorbell, clock: Callable[[], int]) -> None:
        self._folder = spool_folder(path)
        self._doorbell = doorbell
        self._clock = clock

    def append_all(self, db: sqlite3.Connection, catalogue: TopicCatalogue) -> None:
        """Append all that was written to spools by now, and wake the readers."""
        try:
            names = sorted(filter(is_segment, os.listdir(self._folder)))
        except OSError:
            return
        if not names or not is_private(self._folder):
            return
        db.execute(
            "CREATE TABLE IF NOT EXISTS spools"
            " (name TEXT PRIMARY KEY, position INTEGER NOT NULL) WITHOUT ROWID"
        )
        positions: dict[str, int] = dict(db.execute("SELECT name, position FROM spools").fetchall())
        for name, following in zip(names, [*names[1:], ""], strict=True):
            has_successor = name.partition("-")[0] == following.partition("-")[0]
            # Spools that cannot be read now stay as they are.
            with suppress(OSError):
                self._append_segment(db, catalogue, name, positions.get(name, 0), has_successor)

    def _append_segment(
        self,
        db: sqlite3.Connection,
        catalogue: TopicCatalogue,
        name: str,
        position: int,
        has_successor: bool,
    ) -> None:
        path = self._folder / name
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                return
            # In this order: what a writer adds before it is gone is read.
            finished = has_successor or _is_abandoned(file)
            while (size := os.fstat(file).st_size) > position:
                before = position
                position = self._append_chunk(db, catalogue, name, file, size)
                if position <= before:
                    break
            if finished:
                # In this order: a row without a file does no harm, a file without its row would be
                # taken in again.
                path.unlink(missing_ok=True)
                db.execute("DELETE FROM spools WHERE name = ?", (name,))
        finally:
            os.close(file)

    def _append_chunk(
        self, db: sqlite3.Connection, catalogue: TopicCatalogue, name: str, file: int, size: int
    ) -> int:
        """Append the next entries in one transaction; the position behind them."""
        topics: set[str] = set()
        with _forgetting(catalogue), transaction(db, write=True):
            row = db.execute("SELECT position FROM spools WHERE name = ?", (name,)).fetchone()
            if row is None and os.fstat(file).st_nlink == 0:
                return size  # another process has taken in all of it since we opened it
            position: int = 0 if row is None else row[0]
            data = os.pread(file, min(CHUNK_BYTES, max(0, size - position)), position)
            parsed = parse(data)
            for entry in parsed.entries:
                topics |= self._append_entry(db, catalogue, entry)
            after = position + parsed.used
            if parsed.rest == "damaged" and parsed.used == 0:
                # The writer begins another segment when it sees that this one was changed.
                after = size
                logger.warning(
                    "a damaged spool: what follows is lost",
                    extra={"action": "intake", "reason": f"{self._folder / name} at {position}"},
                )
            if after != position:
                db.execute(
                    "INSERT INTO spools (name, position) VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET position = excluded.position",
                    (name, after),
                )
        if topics:
            self._doorbell.ring(topic_mask(topics))
        return after

    def _append_entry(
        self, db: sqlite3.Connection, catalogue: TopicCatalogue, entry: Entry
    ) -> set[str]:
        """Within the caller's transaction; the topics that were written."""
        if entry.topics:
            names = [spec.name for spec in entry.topics]
            if len(catalogue.known(db, names)) < len(set(names)):
                add_topics(db, entry.topics)
            return set()
        now_ms = min(entry.written_ms, self._clock())
        try:
            append_within(db, catalogue, entry.records, now_ms)
        except (RecordTooLarge, UnknownTopic) as error:
            # Checked for all of them before any is written; a writer checks by the same topics.
            reason = f"{len(entry.records)} records: {error}"
            logger.warning("not taken in", extra={"action": "intake", "reason": reason})
            return set()
        return {record.partition.topic for record in entry.records}


class Turn:
    """The claim to be woken for spools, one process at a time; it goes with its process."""

    def __init__(self, path: Path) -> None:
        self._folder = spool_folder(path)
        self._file = -1

    def acquire(self) -> bool:
        """Whether it is ours now. Never waits."""
        path = self._folder / _TURN
        try:
            if self._file >= 0 and os.path.samestat(os.fstat(self._file), os.stat(path)):
                return True
            self.close()
            make_private(self._folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Give it up."""
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1


@contextmanager
def _forgetting(catalogue: TopicCatalogue) -> Iterator[None]:
    """Topics that were read within a transaction are there only if it was committed."""
    try:
        yield
    except BaseException:
        catalogue.clear()
        raise


def _is_abandoned(file: int) -> bool:
    """Whether its writer has let go of it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
