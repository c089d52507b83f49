"""Whether two series of numbers differ by more than their noise: Welch's test on batch means. Pure.

Neighbouring steps are alike: a garbage collection, a neighbour on the node, a slow disk lasts for
many of them. A test that takes them for independent finds a difference in any two series that are
long enough. So each series is cut into batches of neighbours, so long that the centres of the
batches are not correlated any more (the method of batch means, as for simulations: Law, Simulation
Modeling and Analysis, chapter 9). On the centres, which are few and nearly independent, Welch's
t-test decides, which allows different spreads. Where even the longest batches are correlated, a
short series of values that are much alike says little: its spread and its degrees of freedom are
then those of as many independent values as it is worth.

What is tested is a ratio where all centres are above zero (the difference of their logarithms),
else a difference. Nothing is drawn by chance: equal series give equal answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Centre = Literal["median", "mean", "p95"]

ALPHA: Final = 0.01
"""How often, at most, two series of one distribution are taken for different in one direction."""

MIN_VALUES: Final = 40
"""With fewer values of a series nothing is decided."""

TEST: Final = "Welch's t-test on batch means"

_MIN_INDEPENDENT: Final = 4.0
_MAX_BATCHES: Final = 32
_MIN_BATCHES: Final = 8
_CORRELATED: Final = 1.0
"""Batches are made longer while neighbours are correlated by more than so many standard errors."""

_MEDIAN_VARIANCE: Final = math.pi / 2
"""The variance of a median against that of a mean, of normal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How much a number has changed from the first series to the second.

    Attributes:
        relative: whether `change`, `low` and `high` are shares of the first (0.05: 5 % more), or
            differences in the unit of the values.
        low, high: each the bound of a one-sided interval of confidence 1 - ALPHA.
        first, second: the means of the centres of the batches; geometric ones if `relative`.
        values, batches: how many, of the first and of the second series.
    """

    first: float
    second: float
    relative: bool
    change: float
    low: float
    high: float
    values: tuple[int, int]
    batches: tuple[int, int]

    @property
    def certain(self) -> bool:
        """Whether the change is more than noise."""
        return self.low > 0 or self.high < 0


def change_of(
    first: Floats, second: Floats, *, centre: Centre = "median", relative: bool = True
) -> Change | None:
    """The change and its bounds; None: one of the series has too few finite values, or they are so
    much alike that they say nothing.

    Args:
        relative: ask for a ratio; a difference is given instead where a centre is not above zero.
    """
    a, b = (series[np.isfinite(series)] for series in (first, second))
    if min(a.size, b.size) < MIN_VALUES:
        return None
    worth = independent_values(a), independent_values(b)
    if min(worth) < _MIN_INDEPENDENT:
        return None
    x, y = batch_centres(a, centre), batch_centres(b, centre)
    ratio = relative and bool((x > 0).all() and (y > 0).all())
    if ratio:
        logs = (np.log(np.maximum(a, min(x) / 1e6)), np.log(np.maximum(b, min(y) / 1e6)))
        low, high = _bounds(np.log(x), np.log(y), logs, worth)
        low, high = _ratio(low), _ratio(high)
        middle = math.exp(float(np.log(x).mean())), math.exp(float(np.log(y).mean()))
        change = math.expm1(float(np.log(y).mean() - np.log(x).mean()))
    else:
        low, high = _bounds(x, y, (a, b), worth)
        middle = float(x.mean()), float(y.mean())
        change = middle[1] - middle[0]
    return Change(
        first=middle[0],
        second=middle[1],
        relative=ratio,
        change=change,
        low=low,
        high=high,
        values=(int(a.size), int(b.size)),
        batches=(int(x.size), int(y.size)),
    )


def _ratio(logarithm: float) -> float:
    try:
        return math.expm1(logarithm)
    except OverflowError:
        return math.inf


def batch_centres(values: Floats, centre: Centre) -> Floats:
    """The centres of batches so long that neighbours are not correlated, float64[batches]."""
    batches = _MAX_BATCHES if centre != "p95" else min(_MAX_BATCHES, max(values.size // 40, 1))
    batches = max(min(batches, values.size // 5), _MIN_BATCHES)
    found = _cut(values, batches, centre)
    while batches > _MIN_BATCHES and _correlation(found) > _CORRELATED / math.sqrt(batches):
        batches = max(batches // 2, _MIN_BATCHES)
        found = _cut(values, batches, centre)
    return found


def independent_values(values: Floats) -> float:
    """How many independent values a series of alike neighbours is worth, as for a process of the
    first order; by ranks, so that outliers do not hide the likeness."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    # Equal values have the rank in their middle.
    found = _correlation((np.cumsum(counts) - (counts - 1) / 2)[places])
    # The estimate of a short series is too low (Kendall, 1954).
    likeness = min(max(found + (1 + 3 * found) / values.size, 0.0), 0.999)
    return values.size * (1 - likeness) / (1 + likeness)


def t_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's t distribution.

    Exact for 1 and 2 degrees of freedom; by the expansion of Cornish and Fisher to half a percent
    for 5 and more, and to a few percent between.
    """
    if freedom < 2:
        return math.tan(math.pi * (share - 0.5))
    if freedom < 3:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _bounds(
    x: Floats, y: Floats, values: tuple[Floats, Floats], worth: tuple[float, float]
) -> tuple[float, float]:
    """One-sided bounds of the difference of the means, each of confidence 1 - ALPHA."""
    gap = float(y.mean() - x.mean())
    exact = 1e-12 * max(float(np.abs(x).max()), float(np.abs(y).max()))
    gap = 0.0 if abs(gap) <= exact else gap
    parts, counts = [], []
    for centres, every, independent in zip((x, y), values, worth, strict=True):
        part, count = float(centres.var(ddof=1)) / centres.size, float(centres.size)
        if independent < 2 * centres.size:
            part = max(part, _MEDIAN_VARIANCE * _spread(every) ** 2 / max(independent, 1.0))
            count = min(count, max(independent, 2.0))
        parts.append(part)
        counts.append(count)
    error = math.sqrt(sum(parts))
    if error <= exact:
        return gap, gap
    freedom = sum(parts) ** 2 / sum(
        part**2 / (count - 1) for part, count in zip(parts, counts, strict=True)
    )
    reach = t_quantile(1 - ALPHA, freedom) * error
    return gap - reach, gap + reach


def _spread(values: Floats) -> float:
    """A standard deviation that outliers do not move."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _cut(values: Floats, batches: int, centre: Centre) -> Floats:
    size = values.size // batches
    # What does not fill a batch is left out at the beginning, where a training settles.
    kept = values[values.size - size * batches :]
    return _centre(kept.reshape(batches, size).T, centre)


def _centre(columns: Floats, centre: Centre) -> Floats:
    """Of each column, float64[columns]."""
    if centre == "mean":
        return np.asarray(columns.mean(axis=0), np.float64)
    share = 50 if centre == "median" else 95
    return np.asarray(np.percentile(columns, share, axis=0), np.float64)


def _correlation(values: Floats) -> float:
    """Of each with its neighbour, -1 to 1; 0 where all are equal."""
    apart = values - values.mean()
    total = float((apart**2).sum())
    return float((apart[1:] * apart[:-1]).sum()) / total if total > 0 else 0.0
