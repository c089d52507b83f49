"""Numbers as a chart shows them: with a unit that suits their size, in few digits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.text import number_text, unit_suffix

Floats = npt.NDArray[np.float64]

_SECONDS: Final = (
    (86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"),
)  # fmt: skip
_BYTES: Final = tuple((1024.0**i, f"{p}iB") for i, p in ((4, "T"), (3, "G"), (2, "M"), (1, "K")))

_LADDERS: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "s": _SECONDS,
    "ms": tuple((1000 * size, name) for size, name in _SECONDS),
    "bytes": (*_BYTES, (1.0, "B")),
    "bytes/s": tuple((size, f"{name}/s") for size, name in (*_BYTES, (1.0, "B"))),
}
"""Units that have larger and smaller ones, the largest first, in units of the first."""

_SHORT: Final = {"%": "percent", "B": "bytes", "B/s": "bytes/s"}
"""The store's names of units."""


def value_text(value: float, unit: str | None = None, digits: int = 3) -> str:
    """A value with its unit, in about `digits` digits: `23.4 ms`, `1.5 GiB`, `45 %`, `1,200`."""
    if not math.isfinite(value):
        return number_text(value)
    size, name = _rung(abs(value), unit)
    return f"{_short(value / size, digits)}{unit_suffix(name)}"


def tick_texts(
    ticks: Sequence[float], unit: str | None = None, *, whole: bool = False
) -> list[str]:
    """The texts of an axis: all in one unit, and with the digits that tell them apart. Of `whole`
    numbers, as steps are, all digits.
    """
    if not ticks:
        return []
    largest = max(abs(tick) for tick in ticks)
    apart = min((b - a for a, b in pairwise(ticks)), default=0.0)
    size, name = _rung(largest, unit)
    if name in ("d", "h", "min") and 0 < apart < size / 2:
        # 15 min, 30 min are clearer than 0.25 h, 0.5 h.
        size, name = _rung(apart, unit)
    shown = [tick / size for tick in ticks]
    suffix = unit_suffix(name)
    gap = min((abs(b - a) for a, b in pairwise(shown)), default=abs(shown[0]))
    even = len(shown) < 3 or math.isclose(shown[2] - shown[1], shown[1] - shown[0], rel_tol=1e-6)
    if not even or gap == 0 or not 1e-3 <= largest / size < (1e12 if whole else 1e7):
        for digits in range(3, 15):
            texts = [f"{_short(value, digits)}{suffix}" for value in shown]
            if len(set(texts)) == len(texts):
                break
        return texts
    decimals = next(
        (n for n in range(9) if all(abs(round(v, n) - v) <= 1e-6 * gap for v in shown)), 9
    )
    return [f"{value + 0.0:,.{decimals}f}{suffix}" for value in shown]


def _rung(largest: float, unit: str | None) -> tuple[float, str | None]:
    """The size and the name of the unit in which a number of that size is shown."""
    unit = _SHORT.get(unit or "", unit)
    ladder = _LADDERS.get(unit or "")
    if ladder is None:
        return 1.0, unit
    if largest == 0 or not math.isfinite(largest):
        return 1.0, next(name for size, name in ladder if size == 1.0)
    for size, name in ladder:
        # 90 s are clearer than 1.5 min.
        if largest >= (2 * size if name in ("d", "h", "min") else size):
            return size, name
    return ladder[-1]


def _short(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < max(1e7, 10.0**digits):
        rounded = float(f"{value:.{digits}g}") if abs(value) < 10**digits else round(value)
        return f"{rounded:,.{max(digits, 10)}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"
