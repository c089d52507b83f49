"""Records of runs that somebody else serves for now: dropped, or kept until nobody does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from tocsin.bus.port import Partition, Record

Skip = Callable[[str], Awaitable[bool]]

ASK_MS: Final = 2_000
"""An answer of `skip` counts for so long."""


class SkippedRuns:
    """Which runs are skipped, and with `hold` their records, in order.

    `refresh` asks; all else is pure. A record that is held keeps commits from going past it.
    """

    def __init__(self, skip: Skip | None, *, hold: bool) -> None:
        self._skip = skip
        self._hold = hold
        self._answers: dict[bytes, tuple[int, bool]] = {}
        self._records: dict[bytes, list[Record]] = {}

    async def refresh(self, runs: Iterable[bytes], now_ms: int) -> None:
        """Ask about these runs and those whose records are held, unless that was done just now."""
        if self._skip is None:
            return
        for run in {*runs, *self._records}:
            asked_ms, _ = self._answers.get(run, (-ASK_MS, False))
            if not now_ms - ASK_MS < asked_ms <= now_ms:
                answer = await self._skip(run.decode(errors="replace"))
                self._answers[run] = now_ms, answer
        if len(self._answers) > 10_000:
            self._answers = {run: self._answers[run] for run in self._records}

    def skips(self, record: Record) -> bool:
        """Whether this record is not for us now; takes it into custody if records are held."""
        if self._skip is None or not self._answers.get(record.key, (0, False))[1]:
            return False
        if self._hold:
            self._records.setdefault(record.key, []).append(record)
        return True

    def released(self) -> list[Record]:
        """The records of the runs that nobody serves any more, in order per run."""
        free = [run for run in self._records if not self._answers[run][1]]
        return [record for run in free for record in self._records.pop(run)]

    def next_ask_ms(self) -> int | None:
        """When to `refresh` for the sake of the records held; None if there are none."""
        return min((self._answers[run][0] + ASK_MS for run in self._records), default=None)

    def before(self, partition: Partition, offset: int) -> int:
        """`offset`, or that of the first record held of that partition if it is lower."""
        firsts = (rows[0] for rows in self._records.values())
        return min([offset, *(first.offset for first in firsts if first.partition == partition)])

    def drop(self, partitions: Collection[Partition]) -> None:
        """These partitions are another worker's now."""
        self._records = {
            run: rows for run, rows in self._records.items() if rows[0].partition not in partitions
        }

    def clear(self) -> None:
        """Drop all records."""
        self._records.clear()
