"""The spool of a process: how a training hands records to an embedded bus.

A process that has SQLite's shared memory mapped is killed by SIGBUS when somebody truncates that
file. So a training opens no file of the bus. It appends to a file of its own beside it, with plain
`write` calls, and rings the doorbell; a process that reads the bus takes the records in
(`tocsin.bus.embedded.intake`).

A spool is a chain of segments `WRITER-NUMBER` in the folder `BUSFILE.spool`. The writer holds a
lock on its newest one for as long as it lives; the others are removed when they have been taken in.
Each segment begins with the topics, so that a new bus can be made from it. An entry is a header of
12 bytes (magic, length, CRC) and its body: when it was written, and records, or topics.

A record that was acknowledged survives SIGKILL of the process: it is in the page cache of the
kernel. The writer looks before each entry whether its file is still what it has left there; if it
was deleted or changed, the next segment begins.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from tocsin.bus.embedded.doorbell import Doorbell, topic_mask
from tocsin.bus.embedded.location import make_folder
from tocsin.bus.embedded.log import pack_headers, unpack_headers
from tocsin.bus.port import (
    BusClosed,
    BusUnavailable,
    Outgoing,
    Partition,
    UnknownTopic,
    record_size,
)
from tocsin.schemas.errors import RecordTooLarge
from tocsin.schemas.process.private_folders import make_private
from tocsin.schemas.topics import TopicSpec

SPOOL: Final = "_spool"
"""The doorbell's name for what is in spools, as if it were a topic."""

SEGMENT_BYTES: Final = 8 * 1024 * 1024
"""A segment that has reached this size gets a successor."""

LIMIT_BYTES: Final = 256 * 1024 * 1024
"""Bytes that may be beside one bus while nobody takes them in; nothing is added beyond it."""

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
"""Of one entry."""

_MOST_PARTITIONS: Final = 1_000
_BATCH_BYTES: Final = 2 * 1024 * 1024
_HEAD: Final = struct.Struct("<4sII")
_MAGIC: Final = b"tcs1"
_RECORD: Final = struct.Struct("<HIIII")
_NO_VALUE: Final = 0xFFFFFFFF
_TOPICS, _RECORDS = b"T", b"R"


@dataclass(frozen=True, slots=True)
class Entry:
    """Records or topics, and when they were written (Unix, milliseconds)."""

    written_ms: int
    records: tuple[Outgoing, ...] = ()
    topics: tuple[TopicSpec, ...] = ()


def spool_folder(path: Path) -> Path:
    """Where the spools beside that bus file are."""
    return path.with_name(path.name + ".spool")


def is_segment(name: str) -> bool:
    """Whether a file of that name in the folder is a segment."""
    writer, _, number = name.partition("-")
    return len(writer) == 32 and len(number) == 6 and number.isdecimal() and writer.isalnum()


def has_spools(path: Path) -> bool:
    """Whether something was written beside that bus file that may not have been taken in."""
    try:
        return any(is_segment(name) for name in os.listdir(spool_folder(path)))
    except OSError:
        return False


def encode(entry: Entry) -> bytes:
    """The entry with its header. Raises ValueError if it is too long."""
    if entry.topics:
        topics = json.dumps([asdict(spec) for spec in entry.topics]).encode()
        body = _TOPICS + struct.pack("<Q", entry.written_ms) + topics
    else:
        parts = [_RECORDS, struct.pack("<Q", entry.written_ms)]
        for record in entry.records:
            topic, headers = record.partition.topic.encode(), pack_headers(record.headers)
            value = b"" if record.value is None else record.value
            size = _NO_VALUE if record.value is None else len(value)
            head = _RECORD.pack(
                len(topic), record.partition.number, len(record.key), len(headers), size
            )
            parts += (head, topic, record.key, headers, value)
        body = b"".join(parts)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"an entry of {len(body):,} bytes is over the limit of {MAX_BODY_BYTES:,}")
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


Rest = Literal["none", "incomplete", "damaged"]
"""What stands behind the last whole entry: nothing, the begin of one, or something else."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The whole entries at the begin of some bytes, how many bytes they have, and what follows."""

    entries: tuple[Entry, ...]
    used: int
    rest: Rest


def parse(data: bytes) -> Parsed:
    """The entries; raises nothing, whatever the bytes are."""
    entries: list[Entry] = []
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            return Parsed(tuple(entries), at, "incomplete")
        magic, size, check = _HEAD.unpack_from(data, at)
        if magic != _MAGIC or size > MAX_BODY_BYTES:
            return Parsed(tuple(entries), at, "damaged")
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(body) < size:
            return Parsed(tuple(entries), at, "incomplete")
        try:
            if zlib.crc32(body) != check:
                raise ValueError("the checksum is another one")
            entries.append(_decode(body))
        except (ValueError, TypeError, RecursionError, struct.error):
            return Parsed(tuple(entries), at, "damaged")
        at += _HEAD.size + size
    return Parsed(tuple(entries), at, "none")


def _decode(body: bytes) -> Entry:
    (written_ms,) = struct.unpack_from("<Q", body, 1)
    if body[:1] == _TOPICS:
        specs = tuple(TopicSpec(**fields) for fields in json.loads(body[9:]))
        if not all(0 < spec.partitions <= _MOST_PARTITIONS for spec in specs):
            raise ValueError(f"a topic with more than {_MOST_PARTITIONS:,} partitions")
        return Entry(written_ms, topics=specs)
    if body[:1] != _RECORDS:
        raise ValueError(f"an entry of the kind {body[:1]!r}")
    return Entry(written_ms, tuple(_records(body)))


def _records(body: bytes) -> Iterator[Outgoing]:
    at = 9

    def read(size: int) -> bytes:
        nonlocal at
        part, at = body[at : at + size], at + size
        if at > len(body):
            raise ValueError("a record that is longer than its entry")
        return part

    while at < len(body):
        topic_size, number, key_size, headers_size, value_size = _RECORD.unpack(read(_RECORD.size))
        topic, key = read(topic_size).decode(), read(key_size)
        headers = unpack_headers(read(headers_size))
        value = None if value_size == _NO_VALUE else read(value_size)
        yield Outgoing(Partition(topic, number), key, value, headers)


class Spool:
    """The chain of segments of one writer. Its methods block; one thread at a time."""

    def __init__(
        self,
        path: Path,
        specs: Sequence[TopicSpec],
        clock: Callable[[], int],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._path = path
        self._folder = spool_folder(path)
        self._specs = tuple(specs)
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        # Names are taken in by their order: of two writers of a process the earlier one first.
        self._writer = f"{clock() & 0xFFFFFFFFFFFF:012x}{uuid.uuid4().hex[12:]}"
        self._number = 0
        self._file = -1
        self._name = self._folder
        self._size = 0

    def append(self, records: Sequence[Outgoing]) -> None:
        """Write them in order, in one or more entries. Raises BusUnavailable."""
        now_ms = self._clock()
        try:
            for batch in _batches(records):
                data = encode(Entry(now_ms, batch))
                if not self._is_mine() or self._size >= self._segment_bytes:
                    self._start_segment()
                self._write(data)
        except OSError as error:
            self.close()
            raise BusUnavailable(
                f"cannot write {self._folder} ({error.strerror or error}): the disk is full or "
                "failing, or the folder cannot be written"
            ) from error

    def close(self) -> None:
        """Let go of the newest segment; a later `append` begins another."""
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _is_mine(self) -> bool:
        """Whether the newest segment is as it was left."""
        if self._file < 0:
            return False
        mine = os.fstat(self._file)
        try:
            there = os.stat(self._name, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(mine, there) and mine.st_size == self._size

    def _start_segment(self) -> None:
        self.close()
        make_folder(self._path)
        make_private(self._folder)
        self._require_room()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            self._name = self._folder / f"{self._writer}-{self._number:06}"
            self._number += 1
            self._file, self._size = os.open(self._name, flags, 0o600), 0
            # In the moment before the lock it looks like one that a dead process has left behind.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._is_mine():
                break
            self.close()
        self._write(encode(Entry(self._clock(), topics=self._specs)))

    def _require_room(self) -> None:
        # Of all writers: one that comes back after a failure is another one.
        waiting = 0
        for name in filter(is_segment, os.listdir(self._folder)):
            with suppress(OSError):
                waiting += os.stat(self._folder / name).st_size
        if waiting >= self._limit_bytes:
            raise BusUnavailable(
                f"{self._folder} holds {waiting / 1e6:,.0f} MB that nobody has taken in: any "
                "command that reads the bus does, such as `tocsin status`"
            )

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
        except OSError:
            self._undo()
            raise
        if written < len(data):
            self._undo()
            raise OSError(f"{written:,} of {len(data):,} bytes were written")
        self._size += written

    def _undo(self) -> None:
        """Take away what was written of an entry; a reader waits for the rest of it."""
        with suppress(OSError):
            os.ftruncate(self._file, self._size)


def _batches(records: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, ...]]:
    batch: list[Outgoing] = []
    size = 0
    for record in records:
        more = record_size(record)
        if batch and size + more > _BATCH_BYTES:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(record)
        size += more
    if batch:
        yield tuple(batch)


class SpoolWriter:
    """Writes records to a spool, as a producer of the port would write them to the bus."""

    def __init__(self, spool: Spool, doorbell: Doorbell, limits: Mapping[str, int]) -> None:
        self._spool = spool
        self._doorbell = doorbell
        self._limits = limits
        self._closed = False
        # A publish that was given up may be at work still in its thread.
        self._lock = threading.Lock()

    async def publish(self, records: Sequence[Outgoing], /) -> None:
        """Append the records and wait until they are written.

        Raises:
            RecordTooLarge, UnknownTopic: before anything is written. BusUnavailable, BusClosed.
        """
        if self._closed:
            raise BusClosed("this producer is closed")
        for record in records:
            limit = self._limits.get(record.partition.topic)
            if limit is None:
                raise UnknownTopic(f"the bus has no topic {record.partition.topic!r}")
            if (size := record_size(record)) > limit:
                raise RecordTooLarge(size, limit)
        if records:
            await asyncio.get_running_loop().run_in_executor(None, self._append, records)

    async def close(self) -> None:
        """Close the file, unless a write is under way: then it is closed with the process."""
        self._closed = True
        # Whoever holds it waits for a disk; the file is closed with the process then.
        if self._lock.acquire(blocking=False):
            self._spool.close()
            self._lock.release()

    def _append(self, records: Sequence[Outgoing]) -> None:
        with self._lock:
            self._spool.append(records)
            self._doorbell.ring(topic_mask({SPOOL}))


class SpooledBus:
    """An embedded bus as a training has it: records go in, nothing is read.

    It opens no file of the bus and maps none, so nothing that happens to them reaches this process.
    """

    def __init__(self, path: Path, clock: Callable[[], int]) -> None:
        self.path = path
        self._clock = clock
        self._specs: tuple[TopicSpec, ...] = ()
        self._doorbell: Doorbell | None = None
        self._writers: list[SpoolWriter] = []

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableBus or BusUnavailable."""
        self._doorbell = Doorbell(self.path)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all that was made of this bus."""
        for writer in self._writers:
            await writer.close()
        self._writers.clear()
        doorbell, self._doorbell = self._doorbell, None
        if doorbell is not None:
            doorbell.close()

    async def init(self, specs: Sequence[TopicSpec]) -> None:
        """Say which topics there are; who takes the records in creates those that are missing."""
        self._specs = tuple(specs)

    async def producer(self) -> SpoolWriter:
        """A new spool. Nothing is written before the first record."""
        if self._doorbell is None:
            raise BusClosed(f"the bus embedded:{self.path} is not open")
        limits = {spec.name: spec.max_record_bytes for spec in self._specs}
        spool = Spool(self.path, self._specs, self._clock)
        writer = SpoolWriter(spool, self._doorbell, limits)
        self._writers.append(writer)
        return writer
