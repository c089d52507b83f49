"""A series of numbers as one short line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_BARS: Final = "▁▂▃▄▅▆▇█"
_NOT_FINITE: Final = "!"
_LOGARITHMIC: Final = 1_000.0
"""Positive numbers whose largest is so many times the smallest are drawn by their logarithms."""


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The last `width` values, one character each, scaled to their own range.

    A value that is NaN or infinite is a `!`. A flat series is drawn low.
    """
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return _NOT_FINITE * len(shown)
    low, high = min(finite), max(finite)
    if low > 0 and high / low > _LOGARITHMIC:
        shown = [math.log(value) if value > 0 else value for value in shown]
        low, high = math.log(low), math.log(high)
    return "".join(_bar(value, low, high) for value in shown)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    if high <= low:
        return _BARS[0]
    # Halved first: the range of two large floats may be infinite.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
