"""Housekeeping of an embedded bus: retention, compaction, tombstones, offsets of groups that are
gone, and giving space back.

Done in slices: each transaction holds the write lock for some milliseconds only, and a call ends
when its budget is spent and returns whether more is to be done.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tocsin.bus.embedded.log import record_range, split_id
from tocsin.bus.embedded.tables import checkpoint, transaction

_SLICE_MS: Final = 5.0
"""What one transaction should take; the amount of work in it is halved and doubled to stay near."""

_MOST: Final = 64
"""Records or pages in one transaction, at most."""

_FREE_PAGES_KEPT: Final = 256
"""Free pages are used again by the next records; only beyond a tenth of the file, and 4 MB, are
they given back.
"""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """What one call did. `more`: the budget was spent before all was done."""

    expired: int = 0
    compacted: int = 0
    offsets: int = 0
    pages_freed: int = 0
    more: bool = False


class _Budget:
    """The milliseconds of one call, and how much to do in its next transaction."""

    def __init__(self, budget_ms: float) -> None:
        self._ends = time.perf_counter() + budget_ms / 1_000
        self.amount = 4

    @contextmanager
    def slice(self) -> Iterator[None]:
        """Around each transaction; sets `amount` for the next one."""
        began = time.perf_counter()
        yield
        took_ms = (time.perf_counter() - began) * 1_000
        if took_ms > _SLICE_MS:
            self.amount = max(1, self.amount // 2)
        elif took_ms < _SLICE_MS / 3:
            self.amount = min(_MOST, self.amount * 2)

    def spent(self) -> bool:
        """Whether to leave the rest for another time."""
        return time.perf_counter() >= self._ends


def maintain(db: sqlite3.Connection, budget_ms: float, now_ms: int) -> Maintenance:
    """One round within the budget; `now_ms` is the time that retention is counted from. Blocks for
    the budget.
    """
    budget = _Budget(budget_ms)
    (pages,) = db.execute("PRAGMA wal_autocheckpoint").fetchone()
    # A checkpoint within a commit holds the write lock for its whole length; one beside does not.
    db.execute("PRAGMA wal_autocheckpoint = 0")
    try:
        done = _work(db, budget, now_ms)
    finally:
        db.execute(f"PRAGMA wal_autocheckpoint = {pages}")
    # In each round: a reader may have stood in the way of the last one, and nobody writes since.
    checkpoint(db)
    return done


def _work(db: sqlite3.Connection, budget: _Budget, now_ms: int) -> Maintenance:
    expired, done = _expire(db, budget, now_ms)
    compacted = offsets = pages = 0
    if done:
        compacted, done = _compact(db, budget, now_ms)
    if done:
        offsets, done = _drop_offsets(db, budget)
    if done:
        pages, done = _vacuum(db, budget)
    return Maintenance(expired, compacted, offsets, pages, not done)


def _expire(db: sqlite3.Connection, budget: _Budget, now_ms: int) -> tuple[int, bool]:
    """Drop what is older than its topic's retention: from the front of each partition. Of a
    compacted topic that is what nobody has replaced for so long."""
    count = 0
    aging = db.execute(
        "SELECT partitions.id, topics.retention_ms, topics.cleanup = 'compact' FROM partitions"
        " JOIN topics ON topics.name = partitions.topic"
        " WHERE topics.retention_ms IS NOT NULL AND partitions.records > 0"
    ).fetchall()
    for number, retention_ms, compacted in aging:
        low, high = record_range(number)
        while True:
            with transaction(db, write=False):
                rows = db.execute(
                    "SELECT id, append_ms FROM records WHERE id >= ? AND id < ?"
                    " ORDER BY id LIMIT ?",
                    (low, high, budget.amount),
                ).fetchall()
            old = [row_id for row_id, append_ms in rows if append_ms < now_ms - retention_ms]
            if not old:
                break
            with budget.slice(), transaction(db, write=True):
                _delete(db, old, stood=bool(compacted))
            count += len(old)
            if budget.spent():
                return count, False
    return count, True


def _compact(db: sqlite3.Connection, budget: _Budget, now_ms: int) -> tuple[int, bool]:
    """Drop what has been replaced, and tombstones whose time is over."""
    count = 0
    while True:
        due = db.execute(
            "SELECT due_ms, id FROM doomed WHERE due_ms <= ? ORDER BY due_ms LIMIT ?",
            (now_ms, budget.amount),
        ).fetchall()
        if not due:
            return count, True
        with budget.slice(), transaction(db, write=True):
            _delete(db, [row_id for _, row_id in due])
            db.executemany("DELETE FROM doomed WHERE due_ms = ? AND id = ?", due)
        count += len(due)
        if budget.spent():
            return count, False


def _drop_offsets(db: sqlite3.Connection, budget: _Budget) -> tuple[int, bool]:
    """Drop the offsets of groups without members of which all that was read before has expired.

    Whoever comes back begins at the same record, the earliest there is. A run has groups of its
    own, so these would add up.
    """
    count, after = 0, ("", -1)
    while True:
        with transaction(db, write=False):
            rows = db.execute(
                "SELECT team, partition, next_offset FROM offsets"
                " WHERE (team, partition) > (?, ?) AND team NOT IN (SELECT team FROM members)"
                " ORDER BY team, partition LIMIT ?",
                (*after, _MOST),
            ).fetchall()
            old = [row for row in rows if _has_expired(db, row[1], row[2])]
        if not rows:
            return count, True
        after = rows[-1][:2]
        if old:
            with budget.slice(), transaction(db, write=True):
                # Not where it was committed once more since.
                db.executemany(
                    "DELETE FROM offsets WHERE team = ? AND partition = ? AND next_offset = ?"
                    " AND team NOT IN (SELECT team FROM members)",
                    old,
                )
            count += len(old)
        if budget.spent():
            return count, False


def _has_expired(db: sqlite3.Connection, number: int, next_offset: int) -> bool:
    """Whether records are deleted by age there, and none before that offset is left."""
    low, _ = record_range(number)
    row = db.execute(
        "SELECT 1 FROM partitions JOIN topics ON topics.name = partitions.topic"
        " WHERE partitions.id = ? AND topics.cleanup = 'delete'"
        " AND NOT EXISTS (SELECT 1 FROM records WHERE id >= ? AND id < ?)",
        (number, low, low + next_offset),
    ).fetchone()
    return row is not None


def _delete(db: sqlite3.Connection, ids: list[int], *, stood: bool = False) -> None:
    """Delete records; `stood`: each may have stood for its key until now, as a tombstone does."""
    for row_id in ids:
        number, _ = split_id(row_id)
        row = db.execute(
            "SELECT key, length(key) + coalesce(length(value), 0), value IS NULL"
            " FROM records WHERE id = ?",
            (row_id,),
        ).fetchone()
        if row is None:
            continue
        key, size, tombstone = row
        db.execute("DELETE FROM records WHERE id = ?", (row_id,))
        if tombstone or stood:
            db.execute(
                "DELETE FROM newest WHERE partition = ? AND key = ? AND id = ?",
                (number, key, row_id),
            )
        db.execute(
            "UPDATE partitions SET records = records - 1, size_bytes = size_bytes - ? WHERE id = ?",
            (size, number),
        )


def _vacuum(db: sqlite3.Connection, budget: _Budget) -> tuple[int, bool]:
    """Give free pages back to the file system, some at a time."""
    count = 0
    while True:
        (free,) = db.execute("PRAGMA freelist_count").fetchone()
        (total,) = db.execute("PRAGMA page_count").fetchone()
        if free <= max(_FREE_PAGES_KEPT, total // 10):
            return count, True
        pages = budget.amount
        with budget.slice():
            # Each step of this statement frees one page, so it has to be run to its end.
            db.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
        count += pages
        if budget.spent():
            return count, False
