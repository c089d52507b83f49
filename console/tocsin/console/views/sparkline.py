"""How a number went, in bounded memory: a loss as a sparkline, steps a second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

POINTS: Final = 240
"""Most buckets of a series; more points make each bucket hold more of them."""

LOG_RANGE: Final = 50.0
"""A sparkline is drawn in logarithms when its largest value is this many times its smallest."""

BLOCKS: Final = "▁▂▃▄▅▆▇█"
NONFINITE: Final = "x"

_RATE_WINDOW_MS: Final = 10_000
_RATE_STEP_MS: Final = 250
_RATE_SAMPLES: Final = 48


@dataclass(slots=True)
class Bucket:
    """Some neighbouring points: how many, the sum of the finite ones, whether any was not."""

    count: int = 0
    finite: int = 0
    total: float = 0.0
    nonfinite: bool = False

    def add(self, value: float) -> None:
        """Take in one point."""
        self.count += 1
        if math.isfinite(value):
            self.finite += 1
            self.total += value
        else:
            self.nonfinite = True

    @property
    def mean(self) -> float | None:
        """The mean of the finite points; None without any, or if their sum is not finite."""
        mean = self.total / self.finite if self.finite else math.nan
        return mean if math.isfinite(mean) else None


class LossSeries:
    """A loss over the steps, oldest first: at most `POINTS` buckets of equally many points."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._size = 1

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, value: float) -> None:
        """Take in the next point."""
        if not self._buckets or self._buckets[-1].count >= self._size:
            if len(self._buckets) >= POINTS:
                self._buckets = merged(self._buckets, POINTS // 2)
                self._size *= 2
            self._buckets.append(Bucket())
        self._buckets[-1].add(value)

    def buckets(self, width: int) -> Sequence[Bucket]:
        """The series in at most `width` buckets."""
        return merged(self._buckets, width)


def merged(buckets: Sequence[Bucket], width: int) -> list[Bucket]:
    """Neighbours put together until there are at most `width`."""
    n = len(buckets)
    if n <= width:
        return list(buckets)
    found = []
    for i in range(width):
        part = buckets[i * n // width : (i + 1) * n // width]
        found.append(
            Bucket(
                sum(bucket.count for bucket in part),
                sum(bucket.finite for bucket in part),
                sum(bucket.total for bucket in part),
                any(bucket.nonfinite for bucket in part),
            )
        )
    return found


def sparkline(buckets: Sequence[Bucket]) -> str:
    """One character for each: a block as high as its mean, or `x` where a point was not finite.

    In logarithms where all means are above zero and far apart (`LOG_RANGE`).
    """
    means = [bucket.mean for bucket in buckets if bucket.mean is not None and not bucket.nonfinite]
    if not means:
        return NONFINITE * len(buckets)
    low, high = min(means), max(means)
    logarithmic = low > 0 and high > LOG_RANGE * low
    if logarithmic:
        low, high = math.log(low), math.log(high)
    marks = []
    for bucket in buckets:
        if bucket.nonfinite or bucket.mean is None:
            marks.append(NONFINITE)
            continue
        value = math.log(bucket.mean) if logarithmic else bucket.mean
        # Of values that are equal anyway, and of ones whose difference is no float.
        share = (value - low) / (high - low) if 0 < high - low < math.inf else 0.5
        marks.append(BLOCKS[min(int(share * len(BLOCKS)), len(BLOCKS) - 1)])
    return "".join(marks)


class StepRate:
    """Steps a second over the last ten seconds of what was seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=_RATE_SAMPLES)

    def add(self, step: int, at_ms: int) -> None:
        """Note a step and its time; steps and times that decrease are ignored."""
        seen = self._seen
        if seen and (step <= seen[-1][1] or at_ms < seen[-1][0] + _RATE_STEP_MS):
            return
        seen.append((at_ms, step))
        while len(seen) > 2 and seen[1][0] <= at_ms - _RATE_WINDOW_MS:
            seen.popleft()

    def per_s(self, now_ms: int) -> float | None:
        """Steps per second; None with too few steps, or if the next one is long overdue."""
        if len(self._seen) < 2:
            return None
        (first_ms, first), (last_ms, last) = self._seen[0], self._seen[-1]
        rate = 1000 * (last - first) / (last_ms - first_ms)
        overdue_ms = max(_RATE_WINDOW_MS, 3_000 / rate)
        return rate if now_ms - last_ms <= overdue_ms else None
