"""Where a quantity of a node is heading: a robust slope, and when it meets a limit.

Samples are kept as medians over five seconds, for 20 minutes. A slope is that between the medians
of the first and the last ninth, and counts only if it is steady: on the way, no two neighbouring
ninths bring more than 60 % of the change, no more than a quarter of it is taken back, and the last
three steps between ninths bring at least a fifth (a line brings three eighths). So one jump (a
checkpoint, a data set that is read once) is no trend, nor are ups and downs, nor growth that has
ended or comes to rest, as that of an allocator's pool (a logarithm brings 15 %). The last five
minutes are looked at for themselves, too: a leak that begins late is quick to be seen; less than
that predicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.issues import Series
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS

BUCKETS: Final = 240
SHORT_BUCKETS: Final = 60
PARTS: Final = 9
MAX_AT_ONCE: Final = 0.6
MAX_REVERSED: Final = 0.25
MIN_LATE: Final = 0.2
SPAN_S: Final = 5.0
REACH: Final = 10.0
"""A window predicts ten times its own length, and no further."""


@dataclass(slots=True)
class Trend:
    """One quantity over time, in seconds since its first sample.

    Attributes:
        span_s: of one median, seconds.
        most: medians that are kept; the long window.
        least: those of the short window; fewer predict nothing.
        reach: how many times its own length a window predicts.
    """

    span_s: float = SPAN_S
    most: int = BUCKETS
    least: int = SHORT_BUCKETS
    reach: float = REACH
    start_s: float | None = None
    last: float = 0.0
    times: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    filling: list[float] = field(default_factory=list)
    filling_from: float = 0.0

    def add(self, at_s: float, value: float) -> None:
        """Take a sample (Unix time, seconds); one from before the last is left out."""
        if self.start_s is None:
            self.start_s = at_s
        at = at_s - self.start_s
        if at < self.filling_from or not np.isfinite(value):
            return
        self.last = value
        if self.filling and at >= self.filling_from + self.span_s:
            self._close()
        if not self.filling:
            self.filling_from = at
        self.filling.append(value)

    def slope(self, buckets: int) -> float | None:
        """Units per second over the last `buckets`; None: not steady, or too little is known."""
        if len(self.medians) < self.least:
            return None
        values = np.array_split(np.asarray(self.medians[-buckets:]), PARTS)
        times = np.array_split(np.asarray(self.times[-buckets:]), PARTS)
        ways = np.diff([float(np.median(part)) for part in values])
        change = float(ways.sum())
        if change == 0:
            return None
        shares = ways / change
        at_once = float((shares[:-1] + shares[1:]).max())
        if at_once > MAX_AT_ONCE or -float(shares[shares < 0].sum()) > MAX_REVERSED:
            return None
        if float(shares[-3:].sum()) < MIN_LATE:
            return None
        apart = float(times[-1].mean() - times[0].mean())
        return change / apart if apart > 0 else None

    def change(self) -> float:
        """From the first to the last median of the long window."""
        return self.medians[-1] - self.medians[0] if self.medians else 0.0

    def meets_in_s(self, limit: float) -> float | None:
        """In how many seconds it meets the limit at this pace; None: not, or too far to tell."""
        found = [self._meets(limit, buckets) for buckets in (SHORT_BUCKETS, BUCKETS)]
        return min((ahead for ahead in found if ahead is not None), default=None)

    def _meets(self, limit: float, buckets: int) -> float | None:
        slope = self.slope(buckets)
        if slope is None or (limit - self.last) * slope <= 0:
            return None
        ahead = (limit - self.last) / slope
        window = self.times[-1] - self.times[-buckets:][0]
        return ahead if ahead <= self.reach * window else None

    def series(self, name: str, unit: str, limit: float | None) -> Series:
        """The last points, for the evidence; their steps are seconds since the first sample."""
        return Series(
            name=f"{name} by second"[:200],
            unit=unit,
            x="s",
            steps=tuple(round(at) for at in self.times[-SERIES_POINTS:]),
            values=tuple(self.medians[-SERIES_POINTS:]),
            limit=limit,
        )

    def _close(self) -> None:
        self.times.append(self.filling_from)
        self.medians.append(float(np.median(self.filling)))
        self.filling = []
        del self.times[: -self.most], self.medians[: -self.most]
