"""Dead letters: records that cannot be used are set aside, a flood of them stops the service."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Poison
from tocsin.schemas.errors import RecordError, TocsinError
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.events import clip
from tocsin.schemas.topics import DLQ_PARTITIONS, MAX_RECORD_BYTES, partition_for

logger = logging.getLogger(__name__)

_ROOM_BYTES: Final = 1024
"""For what the bus itself adds to a record."""


class TooManyDeadLetters(TocsinError):
    """So many records cannot be read that the fault is likely in this program or its version."""


def dead_letter(
    record: Record, error: RecordError, *, topic: str, service: str, software: str, now_ms: int
) -> Outgoing:
    """The record as a dead letter: key and value untouched, the reason in headers.

    Only a value that would not fit beside its reason is left out, and the reason says so.
    """
    message = clip(str(error), 500)
    headers = _headers(record, error, message, service, software, now_ms)
    value = record.value
    size = len(record.key) + len(value or b"") + sum(len(k) + len(v) for k, v in headers)
    if size > MAX_RECORD_BYTES - _ROOM_BYTES:
        message = f"{message} (value of {len(value or b''):,} bytes left out: no room for it here)"
        headers, value = _headers(record, error, message, service, software, now_ms), b""
    number = partition_for(record.key, DLQ_PARTITIONS)
    return Outgoing(Partition(topic, number), record.key, value, headers)


def _headers(
    record: Record, error: RecordError, message: str, service: str, software: str, now_ms: int
) -> tuple[tuple[str, bytes], ...]:
    letter = DeadLetter(
        topic=record.partition.topic,
        partition=record.partition.number,
        offset=record.offset,
        error=type(error).__name__,
        message=message,
        service=service,
        software=software,
        at_ms=now_ms,
    )
    return letter.headers() + record.headers


@dataclass(frozen=True, slots=True)
class DeadLetterLimits:
    """When a service stops rather than empty its input into the dead letters."""

    consecutive: int = 100
    share: float = 0.10
    window_ms: int = 300_000
    at_least: int = 100
    """Records in the window before its share is looked at."""


class DeadLetterGuard:
    """Counts good and bad records of one partition. Time comes in as a value."""

    def __init__(self, limits: DeadLetterLimits) -> None:
        self._limits = limits
        self._row = 0
        self._window: deque[tuple[int, int, int]] = deque()
        self._good = self._bad = 0

    def count(self, *, good: int, bad: int, last_bad: int, now_ms: int) -> str | None:
        """Count the records of one round, of which the last `last_bad` were bad.

        Returns why the service must stop, or None.
        """
        limits = self._limits
        self._row = last_bad if good else self._row + bad
        self._window.append((now_ms, good, bad))
        self._good += good
        self._bad += bad
        while self._window[0][0] < now_ms - limits.window_ms:
            _, old_good, old_bad = self._window.popleft()
            self._good -= old_good
            self._bad -= old_bad
        if self._row >= limits.consecutive:
            return f"{self._row:,} records in a row cannot be read"
        total = self._good + self._bad
        if total >= limits.at_least and self._bad > limits.share * total:
            return (
                f"{self._bad:,} of {total:,} records of the last "
                f"{limits.window_ms // 60_000} minutes cannot be read"
            )
        return None


class DeadLetters:
    """Makes dead letters of a service's poison, and says when there is too much of it."""

    def __init__(
        self,
        *,
        topic: str,
        service: str,
        software: str,
        limits: DeadLetterLimits,
        metrics: Metrics,
    ) -> None:
        self._topic = topic
        self._service = service
        self._software = software
        self._limits = limits
        self._metrics = metrics
        self._guards: dict[Partition, DeadLetterGuard] = {}

    def bury(self, poison: Sequence[Poison], now_ms: int) -> list[Outgoing]:
        """The dead letters, to be acknowledged before the offsets move."""
        letters: list[Outgoing] = []
        for bad in poison:
            logger.warning(
                "record set aside",
                extra={
                    "action": self._service,
                    "topic": bad.record.partition.topic,
                    "partition": bad.record.partition.number,
                    "offset": bad.record.offset,
                    "reason": clip(f"{type(bad.error).__name__}: {bad.error}", 500),
                },
            )
            letters.append(
                dead_letter(
                    bad.record,
                    bad.error,
                    topic=self._topic,
                    service=self._service,
                    software=self._software,
                    now_ms=now_ms,
                )
            )
        if letters:
            self._metrics.add(names.DEAD_LETTERS, len(letters), service=self._service)
        return letters

    def check(self, records: Sequence[Record], poison: Sequence[Poison], now_ms: int) -> None:
        """Count a round. Raises TooManyDeadLetters."""
        if not poison and not self._guards:
            return
        bad = {(p.record.partition, p.record.offset) for p in poison}
        rows: dict[Partition, list[bool]] = {}
        for record in records:
            row = rows.setdefault(record.partition, [])
            row.append((record.partition, record.offset) in bad)
        for partition, row in rows.items():
            if partition not in self._guards and not any(row):
                continue
            guard = self._guards.setdefault(partition, DeadLetterGuard(self._limits))
            last_bad = next((i for i, is_bad in enumerate(reversed(row)) if not is_bad), len(row))
            why = guard.count(
                good=len(row) - sum(row), bad=sum(row), last_bad=last_bad, now_ms=now_ms
            )
            if why is not None:
                raise TooManyDeadLetters(
                    f"{partition.topic} partition {partition.number}: {why}; {self._service} stops "
                    f"before it sets more of it aside on {self._topic}. Check that all parts of "
                    "tocsin run the same release"
                )
