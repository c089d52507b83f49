"""How far this machine's clock is ahead of the one that stamps records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from tocsin.bus.port import Partition, Record

WINDOW_MS: Final = 300_000
"""An estimate is of the last one to two windows: clocks are set right now and then."""

SETTLING_MS: Final = 30_000
"""How long the age of any record is taken for it, while none has come that was just appended."""


class BusClock:
    """The smallest age (now less append time) of records read: it is never less than the lead.

    A record that waited to be read says little, so those count that were appended after the end of
    their partition was asked for; before there is one, for a short time, all do.
    """

    def __init__(self) -> None:
        self._ends: dict[Partition, int] = {}
        self._first: tuple[int, int] | None = None
        self._window_ms = 0
        self._least: int | None = None
        self._least_before: int | None = None
        self._asked_ms: int | None = None

    def unknown(self, records: Iterable[Record]) -> bool:
        """Whether the end of a partition of these was never asked for."""
        return any(record.partition not in self._ends for record in records)

    def observe(self, records: Iterable[Record], now_ms: int) -> None:
        """Records that were polled just now. Call it before `observe_ends` of the same round."""
        for record in records:
            age_ms = now_ms - record.append_ms
            if record.offset >= self._ends.get(record.partition, record.offset + 1):
                self._admit(age_ms, now_ms)
            elif self._first is None:
                self._first = now_ms, age_ms
            else:
                self._first = self._first[0], min(self._first[1], age_ms)

    def observe_ends(self, ends: Mapping[Partition, int], now_ms: int) -> None:
        """What lies behind these ends was appended later than now."""
        if ends and self._asked_ms is None:
            self._asked_ms = now_ms
        self._ends.update(ends)

    def ahead_ms(self, now_ms: int) -> int:
        """At most so many milliseconds is this machine's clock ahead, as far as is known; 0 while
        nothing is known. Negative if it is behind: else a silence would be seen so much later.
        """
        known = [age for age in (self._least, self._least_before) if age is not None]
        if not known and self._first is not None and now_ms - self._first[0] < SETTLING_MS:
            known = [self._first[1]]
        return min(known, default=0)

    def known(self, now_ms: int) -> bool:
        """Whether a record has shown how far ahead this clock is, or there was time for one."""
        if self._asked_ms is None:
            return False
        seen = self._first is not None or self._least is not None
        return seen or now_ms - self._asked_ms >= SETTLING_MS

    def _admit(self, age_ms: int, now_ms: int) -> None:
        if self._least is None or not 0 <= now_ms - self._window_ms < WINDOW_MS:
            self._least_before, self._least, self._window_ms = self._least, age_ms, now_ms
        else:
            self._least = min(self._least, age_ms)
