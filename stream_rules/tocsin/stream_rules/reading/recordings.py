"""Telemetry in a file: one line of JSON for each record, compressed. For tests of rules."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Partition, Record
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.topics import Topics, telemetry_partition


class UnreadableRecording(ConfigurationError):
    """A file holds no recorded telemetry."""


def save_records(path: str | Path, records: Iterable[Record]) -> int:
    """Write records; returns how many. The file is there whole, or not at all. May block.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with gzip.open(part, "wt", compresslevel=3) as file:
            for record in records:
                row = [
                    *record.partition,
                    record.offset,
                    record.append_ms,
                    _text(record.key),
                    None if record.value is None else _text(record.value),
                    [[name, _text(value)] for name, value in record.headers],
                ]
                file.write(json.dumps(row) + "\n")
                count += 1
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def load_records(path: str | Path) -> tuple[Record, ...]:
    """The records of a file that `save_records` has written, as replays and tests take them.

    Raises:
        OSError: it cannot be read.
        UnreadableRecording: it is no such file, or not whole.
    """
    found = []
    try:
        with gzip.open(path, "rt") as file:
            for line in file:
                topic, number, offset, append_ms, key, value, headers = json.loads(line)
                found.append(
                    Record(
                        Partition(topic, number),
                        offset,
                        append_ms,
                        _bytes(key),
                        None if value is None else _bytes(value),
                        tuple((name, _bytes(text)) for name, text in headers),
                    )
                )
    except (EOFError, ValueError, TypeError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableRecording(f"{path} holds no recorded telemetry: {error}") from error
    return tuple(found)


def records_of_run(bus: str | Path, run_id: str) -> tuple[Record, ...]:
    """The telemetry of a run on an embedded bus, as far as it is kept. May block.

    Args:
        bus: the file, like `.tocsin/bus.db`.

    Raises:
        UnusableBus: there is no such bus.
    """

    async def read() -> tuple[Record, ...]:
        place = Partition(Topics().telemetry, telemetry_partition(run_id))
        found: list[Record] = []
        async with EmbeddedBus(Path(bus), create=False) as opened:
            reader = await opened.reader({place: EARLIEST})
            end = (await reader.ends([place]))[place]
            while await reader.position(place) < end:
                found += await reader.poll(timeout_s=1.0)
            await reader.close()
        return tuple(record for record in found if record.key == run_id.encode())

    return asyncio.run(read())


def _text(raw: bytes) -> str:
    return base64.b85encode(raw).decode()


def _bytes(text: str) -> bytes:
    return base64.b85decode(text)
