"""Dead letters: the raw bytes untouched, and why, in headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.wire import read_number

_PREFIX: Final = "tocsin-dlq-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Why a record could not be used, and where it stood.

    The record's own key, value and headers go along as they were.
    """

    topic: str
    partition: int
    offset: int
    error: str
    """The class of the error, for example `MalformedRecord`."""
    message: str
    service: str
    """Which service could not use it: `rules`, `actions`, …"""
    software: str = ""
    """Name and version of the writer, for example `tocsin 0.1.0`."""
    at_ms: int = 0
    """When it was put aside, Unix milliseconds."""

    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """The dead letter as bus headers, before those of the original."""
        return (
            (_PREFIX + "topic", self.topic.encode()),
            (_PREFIX + "partition", b"%d" % self.partition),
            (_PREFIX + "offset", b"%d" % self.offset),
            (_PREFIX + "error", clip(self.error).encode()),
            (_PREFIX + "message", clip(self.message).encode()),
            (_PREFIX + "service", clip(self.service).encode()),
            (_PREFIX + "software", clip(self.software).encode()),
            (_PREFIX + "at-ms", b"%d" % self.at_ms),
        )

    @classmethod
    def read(cls, headers: tuple[tuple[str, bytes], ...]) -> Self:
        """Raises MalformedRecord."""
        found = {k.removeprefix(_PREFIX): v for k, v in reversed(headers) if k.startswith(_PREFIX)}
        try:
            return cls(
                topic=found["topic"].decode(),
                partition=read_number(found["partition"]),
                offset=read_number(found["offset"]),
                error=found["error"].decode(),
                message=found["message"].decode(),
                service=found["service"].decode(),
                software=found.get("software", b"").decode(),
                at_ms=read_number(found.get("at-ms", b"0")),
            )
        except KeyError as error:
            raise MalformedRecord(f"dead letter has no header {_PREFIX}{error.args[0]}") from error
        except UnicodeDecodeError as error:
            raise MalformedRecord("dead letter headers: expected UTF-8") from error
