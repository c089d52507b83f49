"""From numbers to places in a picture: linear and logarithmic scales and their ticks. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tocsin.console.charts.numbers import Floats

LOG_FROM: Final = 1000.0
"""Ratio of the largest value to the smallest from which a scale is logarithmic by itself."""

LARGEST: Final = 1e300
"""Larger numbers have no place in a picture: the difference of two may be no float."""

SMALLEST: Final = 1e-290
"""Smaller numbers have no place on a logarithmic scale: their quotients may be no floats."""

_DAY_S: Final = 86_400
_STEPS: Final = (1.0, 2.0, 5.0, 10.0)
_DURATIONS: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
    3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A range of numbers, laid over a range of places.

    Attributes:
        low, high: the numbers at both ends; `low < high`, and above zero if logarithmic.
        start, end: their places; `end` may be the smaller one, as upright axes have it.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, values: Floats | float) -> Floats:
        """The places; NaN for numbers that have none (a logarithm of nothing)."""
        given = np.asarray(values, np.float64)
        low, high = self.low, self.high
        if self.logarithmic:
            positive = np.where(given > SMALLEST, given, np.nan)
            given, low, high = np.log(positive), math.log(low), math.log(high)
        given = np.where(np.abs(given) < LARGEST, given, np.nan)
        return self.start + (given - low) / (high - low) * (self.end - self.start)

    def place(self, value: float) -> float:
        """The place of one number."""
        return float(self.at(value))

    def inside(self, value: float) -> bool:
        """Whether a number is in the range."""
        return self.low <= value <= self.high


def fitted(
    values: Floats,
    *,
    start: float,
    end: float,
    logarithmic: bool | None = None,
    unit: str | None = None,
    from_zero: bool = False,
) -> Scale:
    """The scale of a vertical axis that holds these numbers, with some room, at round ends.

    Args:
        logarithmic: None: if all numbers are above zero and far apart (`LOG_FROM`).
        unit: shares in percent that are between 0 and 100 get the whole of that range.
        from_zero: for bars and areas, whose length is what is compared.
    """
    shown = values[np.isfinite(values) & (np.abs(values) < LARGEST)]
    if logarithmic:
        shown = shown[shown > SMALLEST]
    if not len(shown):
        return Scale(low=0.0, high=1.0, start=start, end=end)
    low, high = float(shown.min()), float(shown.max())
    if logarithmic is None:
        # Shares, amounts and rates are compared by their size.
        sized = unit in ("percent", "%", "bytes", "bytes/s", "B", "B/s")
        logarithmic = not (from_zero or sized) and low > SMALLEST and high / low > LOG_FROM
    if logarithmic:
        if high <= low * 1.0001:
            low, high = low / 2, high * 2
        share = (high / low) ** 0.04
        low, high = max(low / share, SMALLEST / 10), min(high * share, LARGEST)
        return Scale(low=low, high=high, start=start, end=end, logarithmic=True)
    if unit in ("percent", "%") and low >= 0 and 5 <= high <= 100:
        return Scale(low=0.0, high=100.0, start=start, end=end)
    if from_zero or 0 <= low <= 0.4 * high:
        low, high = min(low, 0.0), max(high, 0.0)
    if high == low:
        room = abs(high) / 2 or 1.0
        low, high = low - (room if low != 0 else 0.0), high + room
    low, high = _apart(low, high)
    step = _step(low, high, 5, unit)
    low, high = _apart(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)
    return Scale(low=low, high=high, start=start, end=end)


def along(low: float, high: float, *, start: float, end: float) -> Scale:
    """The scale of a horizontal axis: exactly from the first to the last place of the data."""
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if high <= low:
        low, high = low - 0.5, low + 0.5
    low, high = _apart(low, high)
    return Scale(low=low, high=high, start=start, end=end)


def ticks(scale: Scale, count: int, *, unit: str | None = None, whole: bool = False) -> list[float]:
    """About `count` round numbers inside the scale, ascending.

    Args:
        unit: `s`: steps that clocks have (30 s, 5 min, 6 h).
        whole: only whole numbers, as steps are.
    """
    if scale.logarithmic:
        return _log_ticks(scale, count)
    step = _step(scale.low, scale.high, count, unit)
    if whole:
        step = max(step, 1.0)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _apart(low: float, high: float) -> tuple[float, float]:
    """The same ends, or ones that are further apart where floats could not tell ticks apart."""
    size = max(abs(low), abs(high))
    if high - low > 1e-12 * size:
        return low, high
    room = size * 1e-6 or 1.0
    return low - room, high + room


def _step(low: float, high: float, count: int, unit: str | None) -> float:
    rough = (high - low) / max(count, 1)
    if not rough > 0:
        return 1.0
    if unit == "s" and rough >= 1:
        days = _DAY_S * _round_step(rough / _DAY_S)
        return next((float(s) for s in _DURATIONS if s >= rough * 0.7), days)
    if unit in ("bytes", "bytes/s") and rough >= 1:
        return _binary_step(rough)
    return _round_step(rough)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((s * power for s in _STEPS if s * power >= rough * 0.999), 10 * power)


def _binary_step(rough: float) -> float:
    power = 1024.0 ** max(math.floor(math.log(max(rough, 1.0), 1024)), 0)
    steps = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1024)
    return next(s * power for s in steps if s * power >= rough * 0.999)


def _log_ticks(scale: Scale, count: int) -> list[float]:
    low, high = math.log10(scale.low), math.log10(scale.high)
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    decades = last - first + 1
    if decades >= 2:
        every = -(-decades // max(count, 1))
        # On multiples of the interval, so that neighbouring charts agree.
        return [10.0**i for i in range(first, last + 1) if i % every == 0]
    fine = [m * 10.0**i for i in range(first - 1, last + 2) for m in (1, 2, 5)]
    inside = [value for value in fine if scale.low <= value <= scale.high]
    return inside or [math.sqrt(scale.low * scale.high)]
