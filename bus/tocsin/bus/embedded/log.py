"""The records of an embedded bus: appending, fetching, finding places in a partition.

Like `tocsin.bus.embedded.tables`, functions that block. The id of a record is `partition id << 40 |
offset`: one B-tree, no index, and a partition is a range of ids. A partition holds up to 2**40
records; there may be 2**23 partitions.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tocsin.bus.embedded.tables import TopicCatalogue, transaction
from tocsin.bus.port import (
    FEW_HEADERS,
    MAX_POLL_BYTES,
    From,
    Headers,
    Outgoing,
    Partition,
    Record,
    record_size,
)
from tocsin.schemas.errors import RecordTooLarge

COMPACTION_LAG_MS: Final = 60_000
"""A replaced record stays this long, so that a reader close to the end sees each change."""


_OFFSET_BITS: Final = 40
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1

_PLACE: Final = struct.Struct("<qq?")

_SLICES: Final = (64, 8, 1)
"""Rows of one statement."""

_SHORT: Final = 1_024
"""Bytes of packed headers that are worth remembering."""


def record_range(number: int) -> tuple[int, int]:
    """The record ids of a partition: from, up to but not including."""
    return number << _OFFSET_BITS, (number + 1) << _OFFSET_BITS


def split_id(row_id: int) -> tuple[int, int]:
    """The partition id and the offset of a record."""
    return row_id >> _OFFSET_BITS, row_id & _OFFSET_MASK


@dataclass(slots=True)
class _Tail:
    next_offset: int
    append_ms: int
    records: int = 0
    size_bytes: int = 0


def append(
    db: sqlite3.Connection, catalogue: TopicCatalogue, records: Sequence[Outgoing], now_ms: int
) -> list[int]:
    """Write all of them in one transaction; their offsets.

    Raises:
        RecordTooLarge, UnknownTopic: before anything is written.
    """
    with transaction(db, write=True):
        return append_within(db, catalogue, records, now_ms)


def append_within(
    db: sqlite3.Connection, catalogue: TopicCatalogue, records: Sequence[Outgoing], now_ms: int
) -> list[int]:
    """Append records within the caller's transaction."""
    ids: list[int] = []
    for record in records:
        limit = catalogue.spec(db, record.partition.topic).max_record_bytes
        size = record_size(record)
        if size > limit:
            raise RecordTooLarge(size, limit)
        ids.append(catalogue.id(db, record.partition))
    tails: dict[int, _Tail] = {}
    for number in dict.fromkeys(ids):
        next_offset, last_ms = db.execute(
            "SELECT next_offset, last_ms FROM partitions WHERE id = ?", (number,)
        ).fetchone()
        tails[number] = _Tail(next_offset, max(now_ms, last_ms))
    offsets: list[int] = []
    rows: list[_Row] = []
    compacted: list[_Compacted] = []
    for record, number in zip(records, ids, strict=True):
        tail = tails[number]
        offset = tail.next_offset
        row_id = number << _OFFSET_BITS | offset
        headers = pack_headers(record.headers)
        checksum = _checksum(row_id, tail.append_ms, record.key, headers, record.value)
        rows.append((row_id, tail.append_ms, record.key, headers, checksum, record.value))
        spec = catalogue.specs[record.partition.topic]
        if spec.cleanup == "compact":
            ends_ms = tail.append_ms + spec.tombstone_ms if record.value is None else None
            compacted.append((number, record.key, row_id, tail.append_ms, ends_ms))
        tail.next_offset += 1
        tail.records += 1
        tail.size_bytes += len(record.key) + len(record.value or b"")
        offsets.append(offset)
    _in_slices(
        db,
        "INSERT INTO records (id, append_ms, key, headers, checksum, value) VALUES {}",
        "?, ?, ?, ?, ?, ?",
        rows,
    )
    _supersede(db, compacted)
    db.executemany(
        "UPDATE partitions SET next_offset = ?, last_ms = ?, records = records + ?,"
        " size_bytes = size_bytes + ? WHERE id = ?",
        [
            (tail.next_offset, tail.append_ms, tail.records, tail.size_bytes, number)
            for number, tail in tails.items()
        ],
    )
    return offsets


_Row = tuple[int, int, bytes, bytes, int, bytes | None]
_Compacted = tuple[int, bytes, int, int, int | None]
"""Partition id, key, record id, append time, and for a tombstone when it ends."""


def _supersede(db: sqlite3.Connection, records: Sequence[_Compacted]) -> None:
    """Of what was just written: it is the newest of its key, and what it replaces will go."""
    newest: dict[tuple[int, bytes], int] = {}
    first: list[tuple[int, int, bytes]] = []
    doomed: list[tuple[int, int]] = []
    for number, key, row_id, append_ms, ends_ms in records:
        replaced = newest.get((number, key))
        if replaced is None:
            first.append((append_ms + COMPACTION_LAG_MS, number, key))
        else:
            doomed.append((append_ms + COMPACTION_LAG_MS, replaced))
        newest[number, key] = row_id
        if ends_ms is not None:
            doomed.append((ends_ms, row_id))
    _in_slices(
        db,
        "INSERT OR IGNORE INTO doomed (due_ms, id) SELECT new.column1, newest.id"
        # The order of a CROSS JOIN is kept: one look-up for each new record.
        " FROM (VALUES {}) AS new CROSS JOIN newest"
        " ON newest.partition = new.column2 AND newest.key = new.column3",
        "?, ?, ?",
        first,
    )
    _in_slices(db, "INSERT OR IGNORE INTO doomed (due_ms, id) VALUES {}", "?, ?", doomed)
    _in_slices(
        db,
        "INSERT INTO newest (partition, key, id) VALUES {}"
        " ON CONFLICT (partition, key) DO UPDATE SET id = excluded.id",
        "?, ?, ?",
        [(number, key, row_id) for (number, key), row_id in newest.items()],
    )


def _in_slices(
    db: sqlite3.Connection, statement: str, row: str, rows: Sequence[tuple[object, ...]]
) -> None:
    """Run a statement with all rows, many at a time.

    Each call of SQLite gives the interpreter to another thread, and gets it back when that one
    rests: of a call for each row, most of the time would be waiting. Few sizes, so that SQLite
    knows the statements already.
    """
    at = 0
    for size in _SLICES:
        text = statement.format(", ".join([f"({row})"] * size)) if len(rows) - at >= size else ""
        while text and len(rows) - at >= size:
            db.execute(text, [value for one in rows[at : at + size] for value in one])
            at += size


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records, and for each partition the position before and after them. `damaged`: the places
    that were passed because their records are not what was written."""

    records: tuple[Record, ...]
    moved: Mapping[Partition, tuple[int, int]]
    more: bool
    damaged: tuple[tuple[Partition, int], ...] = ()


def fetch(
    db: sqlite3.Connection,
    catalogue: TopicCatalogue,
    positions: Mapping[Partition, int],
    max_records: int,
) -> Fetched:
    """The next records, the partitions taken in the order of `positions`, at most
    `MAX_POLL_BYTES`.
    """
    wanted = {catalogue.id(db, partition): partition for partition in positions}
    records: list[Record] = []
    moved: dict[Partition, tuple[int, int]] = {}
    damaged: list[tuple[Partition, int]] = []
    room, more = MAX_POLL_BYTES, False
    with transaction(db, write=False):
        ends = _ends(db, wanted)
        for number, partition in wanted.items():
            position, end = positions[partition], ends[number]
            if position >= end:
                continue
            if len(records) >= max_records or room <= 0:
                more = True
                break
            base = number << _OFFSET_BITS
            limit = max_records - len(records)
            # As bytes even where a bit has made text of them, which sqlite3 would decode.
            cursor = db.execute(
                "SELECT id, append_ms, CAST(key AS BLOB), CAST(headers AS BLOB), checksum,"
                " CAST(value AS BLOB) FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (base | position, base | end, limit),
            )
            # Compaction and retention leave holes, at the end too: no row means that all is read.
            reached = end
            for rows, row in enumerate(cursor, 1):
                row_id, append_ms, key, headers, checksum, value = row
                offset = row_id & _OFFSET_MASK
                if checksum == _checksum(row_id, append_ms, key, headers, value):
                    headers = unpack_headers(headers)
                    records.append(Record(partition, offset, append_ms, key, value, headers))
                else:
                    damaged.append((partition, offset))
                room -= len(value or b"")
                if room <= 0 or rows >= limit:
                    reached, more = offset + 1, True
                    break
            cursor.close()
            moved[partition] = (position, reached)
    return Fetched(tuple(records), moved, more, tuple(damaged))


def ends(
    db: sqlite3.Connection, catalogue: TopicCatalogue, partitions: Sequence[Partition]
) -> dict[Partition, int]:
    """The offset that the next record of each will get. Raises UnknownTopic."""
    wanted = {catalogue.id(db, partition): partition for partition in partitions}
    return {wanted[number]: end for number, end in _ends(db, wanted).items()}


def _ends(db: sqlite3.Connection, wanted: Mapping[int, Partition]) -> dict[int, int]:
    # Ids are integers of our own making, never text from outside.
    ids = ",".join(map(str, wanted))
    return dict(
        db.execute(f"SELECT id, next_offset FROM partitions WHERE id IN ({ids})").fetchall()
    )


def place(
    db: sqlite3.Connection, catalogue: TopicCatalogue, partition: Partition, start: From
) -> int:
    """The offset that `start` means there now. Raises UnknownTopic."""
    number = catalogue.id(db, partition)
    if start.kind == "offset":
        return start.value
    base = number << _OFFSET_BITS
    with transaction(db, write=False):
        end: int = _ends(db, {number: partition})[number]
        if start.kind == "latest":
            return end
        row = db.execute(
            "SELECT min(id) FROM records WHERE id >= ? AND id < ?", (base, base | end)
        ).fetchone()
        first = end if row[0] is None else int(row[0]) & _OFFSET_MASK
        if start.kind == "earliest":
            return first
        return _first_at(db, base, first, end, start.value)


def _first_at(db: sqlite3.Connection, base: int, low: int, high: int, append_ms: int) -> int:
    """Append times never fall within a partition, so this is a binary search over offsets with
    holes.
    """
    end = high
    while low < high:
        middle = (low + high) // 2
        row = db.execute(
            "SELECT append_ms FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT 1",
            (base | middle, base | end),
        ).fetchone()
        if row is None or row[0] >= append_ms:
            high = middle
        else:
            low = middle + 1
    row = db.execute(
        "SELECT id FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT 1",
        (base | low, base | end),
    ).fetchone()
    return end if row is None else int(row[0]) & _OFFSET_MASK


def _checksum(row_id: int, append_ms: int, key: bytes, headers: bytes, value: bytes | None) -> int:
    """CRC-32 of all that a record is: some GB/s, next to nothing beside writing it. -1, which is
    none, if a damaged row has something else in a place of these.
    """
    try:
        start = zlib.crc32(_PLACE.pack(row_id, append_ms, value is None))
        return zlib.crc32(value or b"", zlib.crc32(headers, zlib.crc32(key, start)))
    except (TypeError, struct.error):
        return -1


def pack_headers(headers: Headers) -> bytes:
    """Headers as a record's row, and a spool, hold them."""
    return _repeated_pack(headers) if len(headers) <= FEW_HEADERS else _pack(headers)


def unpack_headers(data: bytes) -> Headers:
    """The reverse. Raises struct.error or ValueError for bytes that are none."""
    return _repeated_unpack(data) if len(data) <= _SHORT else _unpack(data)


def _pack(headers: Headers) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        text = name.encode()
        parts += (struct.pack("<HI", len(text), len(value)), text, value)
    return b"".join(parts)


def _unpack(data: bytes) -> Headers:
    headers, at = [], 0
    while at < len(data):
        name_size, value_size = struct.unpack_from("<HI", data, at)
        at += 6
        name = data[at : at + name_size].decode()
        at += name_size
        headers.append((name, data[at : at + value_size]))
        at += value_size
    return tuple(headers)


_repeated_pack = lru_cache(maxsize=64)(_pack)
_repeated_unpack = lru_cache(maxsize=256)(_unpack)
"""Most records of a sender have the same headers."""
