"""Dead letters: the raw bytes untouched, and why, in headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from tocsin.schemas.errors import MalformedRecord

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
    message: str
    service: str
    software: str = ""
    at_ms: int = 0

    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """As bus headers, to be put before the original's."""
        return (
            (_PREFIX + "topic", self.topic.encode()),
            (_PREFIX + "partition", b"%d" % self.partition),
            (_PREFIX + "offset", b"%d" % self.offset),
            (_PREFIX + "error", self.error.encode()),
            (_PREFIX + "message", self.message.encode()),
            (_PREFIX + "service", self.service.encode()),
            (_PREFIX + "software", self.software.encode()),
            (_PREFIX + "at-ms", b"%d" % self.at_ms),
        )

    @classmethod
    def read(cls, headers: tuple[tuple[str, bytes], ...]) -> Self:
        """Raises MalformedRecord."""
        found = {k.removeprefix(_PREFIX): v for k, v in reversed(headers) if k.startswith(_PREFIX)}
        try:
            return cls(
                topic=found["topic"].decode(),
                partition=int(found["partition"]),
                offset=int(found["offset"]),
                error=found["error"].decode(),
                message=found["message"].decode(),
                service=found["service"].decode(),
                software=found.get("software", b"").decode(),
                at_ms=int(found.get("at-ms", b"0")),
            )
        except (KeyError, ValueError) as error:
            raise MalformedRecord(f"dead letter headers: {error}") from error
