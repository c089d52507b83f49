"""Records of runs that somebody else serves for now: dropped, or kept until nobody does."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from tocsin.bus.port import Partition, Record

Skip = Callable[[str], Awaitable[bool]]

ASK_MS: Final = 2_000
"""An answer of `skip` counts for that long."""

MOST_ANSWERS: Final = 10_000
"""So many of them are kept."""

SERVED_MS: Final = 2 * 86_400_000
"""A run of which no record came for so long is served no more: services keep one for a day after
its end."""


@dataclass(frozen=True, slots=True)
class HoldLimit:
    """Of each run the records of the last `age_ms` are held (append time, before its last one), of
    all together at most `size_bytes` of keys and values; older ones are dropped."""

    age_ms: int = 60_000
    size_bytes: int = 64 * 1024 * 1024


class SkippedRuns:
    """Which runs are skipped, and with `hold` their records, in order, within `limit`.

    `refresh` asks; all else is pure. A record that is held keeps commits from going past it.
    A run whose records went through is served here, until `refresh` finds that it is another's.
    """

    def __init__(self, skip: Skip | None, *, hold: bool, limit: HoldLimit | None = None) -> None:
        self._skip = skip
        self._hold = hold
        self._answers: dict[bytes, tuple[int, bool]] = {}
        self._limit = limit
        self._records: dict[bytes, deque[Record]] = {}
        # With the time of its last record, oldest first.
        self._served: dict[bytes, tuple[Partition, int]] = {}
        self._now_ms = 0
        self._size = 0

    async def refresh(
        self, runs: Iterable[bytes], now_ms: int, *, served: bool = False
    ) -> frozenset[str]:
        """Ask about these runs, those whose records are held, and with `served` those served here,
        unless that was done just now. The runs that were served here and are another's now."""
        if self._skip is None:
            return frozenset()
        self._now_ms = now_ms
        self._drop_silent()
        asked = {*runs, *self._records}
        for run in asked.union(self._served if served else ()):
            asked_ms, _ = self._answers.get(run, (-ASK_MS, False))
            if not now_ms - ASK_MS < asked_ms <= now_ms:
                answer = await self._skip(run.decode(errors="replace"))
                self._answers[run] = now_ms, answer
        lost = [run for run in self._served if self._answers.get(run, (0, False))[1]]
        for run in lost:
            del self._served[run]
        if len(self._answers) > MOST_ANSWERS:
            # `skips` is asked about these next.
            self._answers = {run: self._answers[run] for run in asked}
        return frozenset(run.decode(errors="replace") for run in lost)

    def skips(self, record: Record) -> bool:
        """Whether this record is not for us now; takes it into custody if records are held."""
        if self._skip is None:
            return False
        if not self._answers.get(record.key, (0, False))[1]:
            self._serve(record)
            return False
        if self._hold:
            self._records.setdefault(record.key, deque()).append(record)
            self._size += _size(record)
            if self._limit is not None:
                self._trim(record, self._limit)
        return True

    def released(self) -> list[Record]:
        """The records of the runs that nobody serves any more, in order per run."""
        free = [run for run in self._records if not self._answers[run][1]]
        records = [record for run in free for record in self._records.pop(run)]
        for record in records:
            self._serve(record)
        self._size -= sum(map(_size, records))
        return records

    def next_ask_ms(self) -> int | None:
        """When to `refresh` for the sake of the records held; None if there are none."""
        return min((self._answers[run][0] + ASK_MS for run in self._records), default=None)

    def before(self, partition: Partition, offset: int) -> int:
        """`offset`, or that of the first record held of that partition if it is lower."""
        firsts = (rows[0] for rows in self._records.values())
        return min([offset, *(first.offset for first in firsts if first.partition == partition)])

    def drop(self, partitions: Collection[Partition]) -> None:
        """Drop partitions that another worker owns now."""
        self._records = {
            run: rows for run, rows in self._records.items() if rows[0].partition not in partitions
        }
        self._size = sum(_size(record) for rows in self._records.values() for record in rows)
        self._served = {
            run: (at, heard_ms)
            for run, (at, heard_ms) in self._served.items()
            if at not in partitions
        }

    def clear(self) -> None:
        """Drop all records."""
        self._records.clear()
        self._served.clear()
        self._size = 0

    def _serve(self, record: Record) -> None:
        self._served.pop(record.key, None)
        self._served[record.key] = record.partition, self._now_ms

    def _drop_silent(self) -> None:
        while self._served:
            run, (_, heard_ms) = next(iter(self._served.items()))
            if heard_ms > self._now_ms - SERVED_MS:
                return
            del self._served[run]

    def _trim(self, newest: Record, limit: HoldLimit) -> None:
        rows = self._records[newest.key]
        while rows[0].append_ms < newest.append_ms - limit.age_ms:
            self._size -= _size(rows.popleft())
        while self._size > limit.size_bytes:
            oldest = min(self._records, key=lambda run: self._records[run][0].append_ms)
            self._size -= _size(self._records[oldest].popleft())
            if not self._records[oldest]:
                del self._records[oldest]


def _size(record: Record) -> int:
    return len(record.key) + len(record.value or b"")
