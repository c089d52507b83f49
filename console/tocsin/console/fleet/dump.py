"""The file of `tocsin bus dump`: records of a bus, one in JSON on each line, as they were read.

The first line says what the file is. Keys and headers are text of one character a byte; a value is
in base64. A name that ends with `.gz` makes it a gzip file.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tocsin.bus.port import Partition, Record
from tocsin.schemas.errors import ConfigurationError

FORMAT: Final = 1
"""Of the file; a reader refuses a higher one."""


class _Head(BaseModel):
    """The first line."""

    model_config = ConfigDict(extra="ignore", strict=True)

    tocsin_dump: int
    taken_ms: int = Field(ge=0)
    url: str = ""
    prefix: str = "tocsin"


class _Line(BaseModel):
    """A record; `topic` is without the team's prefix: `telemetry`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    topic: str = Field(pattern=r"^[a-z]+$")
    partition: int = Field(ge=0)
    offset: int = Field(ge=0)
    append_ms: int
    key: str
    value: str | None
    headers: list[tuple[str, str]] = []


@dataclass(frozen=True, slots=True)
class Dump:
    """What a dump says of itself: when it was taken (Unix, milliseconds), and of which bus."""

    path: Path
    taken_ms: int
    url: str
    prefix: str

    def records(self) -> Iterator[tuple[str, Record]]:
        """Each record with the short name of its topic, in the order in which it was read. Blocks.

        The partition has the topic's name with the prefix that the bus had.

        Raises:
            ConfigurationError: a line is no record; what came before it is good.
        """
        with _open(self.path) as file:
            file.readline()
            for number, text in enumerate(_lines(file, self.path), 2):
                try:
                    found = _read(_Line.model_validate_json(text), self.prefix)
                except ValueError as error:
                    raise ConfigurationError(
                        f"{self.path}:{number}: expected a record of a dump, found {text[:40]!r}; "
                        "was the file cut off?"
                    ) from error
                yield found


def _read(line: _Line, prefix: str) -> tuple[str, Record]:
    """Raises ValueError: the value is no base64, or the text is not of one character a byte."""
    value = None if line.value is None else base64.b64decode(line.value, validate=True)
    place = Partition(f"{prefix}.{line.topic}.v1", line.partition)
    headers = tuple((name, _bytes(text)) for name, text in line.headers)
    record = Record(place, line.offset, line.append_ms, _bytes(line.key), value, headers)
    return line.topic, record


class DumpWriter:
    """Writes a dump; a context manager. Blocks. `records` counts them.

    Raises:
        ConfigurationError: on entry, if the file is there already or cannot be written.
    """

    def __init__(self, path: Path, *, taken_ms: int, url: str, prefix: str) -> None:
        self._path = path
        self._head = _Head(tocsin_dump=FORMAT, taken_ms=taken_ms, url=url, prefix=prefix)
        self._file: IO[str] | None = None
        self.records = 0

    def __enter__(self) -> Self:
        try:
            raw = self._path.open("xb")
        except FileExistsError:
            raise ConfigurationError(
                f"{str(self._path)!r} exists already; name another file"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot write {str(self._path)!r}: {error}") from error
        if self._path.suffix == ".gz":
            packed = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0)
            self._file = io.TextIOWrapper(packed, encoding="utf-8")
            self._raw: IO[bytes] | None = raw
        else:
            self._file = io.TextIOWrapper(raw, encoding="utf-8")
            self._raw = None
        self._file.write(self._head.model_dump_json() + "\n")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._file is not None
        self._file.close()
        if self._raw is not None:
            self._raw.close()

    def add(self, topic: str, record: Record) -> None:
        """Write a record; `topic` is the short name of its topic."""
        assert self._file is not None
        facts = {
            "topic": topic,
            "partition": record.partition.number,
            "offset": record.offset,
            "append_ms": record.append_ms,
            "key": _text(record.key),
            "value": None if record.value is None else base64.b64encode(record.value).decode(),
            "headers": [(name, _text(value)) for name, value in record.headers],
        }
        self._file.write(json.dumps(facts, separators=(",", ":")) + "\n")
        self.records += 1


def open_dump(path: Path) -> Dump:
    """What the file says of itself. Blocks.

    Raises:
        ConfigurationError: it cannot be read, is no dump, or is one of a later release.
    """
    with _open(path) as file:
        first = next(_lines(file, path), "")
    try:
        head = _Head.model_validate_json(first)
    except ValidationError:
        raise ConfigurationError(
            f"{path}:1: expected a dump of `tocsin bus dump`, found {first[:40]!r}"
        ) from None
    if head.tocsin_dump > FORMAT:
        raise ConfigurationError(
            f"{path}: a dump of format {head.tocsin_dump}; this release reads {FORMAT}: update it"
        )
    return Dump(path, head.taken_ms, head.url, head.prefix)


def is_dump(path: Path) -> bool:
    """Whether the file begins as a dump does. Blocks. Raises ConfigurationError: as `open_dump`."""
    with _open(path) as file:
        return next(_lines(file, path), "").startswith('{"tocsin_dump"')


def _open(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        return path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error}") from error


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    try:
        yield from file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error}") from error


def _text(data: bytes) -> str:
    """One character a byte, so that any bytes come back; ASCII reads as what it is."""
    return data.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
