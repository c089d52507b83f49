"""Fewer points that look the same: the lowest and the highest of neighbours are kept. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tocsin.console.charts.numbers import Floats

Indices = npt.NDArray[np.int64]


def decimate(x: npt.ArrayLike, y: npt.ArrayLike, n: int) -> tuple[Floats, Floats]:
    """At most about `3 n` of the points, in their order: no spike is lost, and no gap.

    Of each of `n` groups of neighbours: the lowest, the highest, and one that is not finite if
    there is any. The first and the last point are always there.
    """
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    kept = kept_points(ys, n)
    return xs[kept], ys[kept]


def kept_points(y: Floats, n: int) -> Indices:
    """Which points `decimate` keeps, int64[kept], in ascending order."""
    count = len(y)
    if n < 1:
        raise ValueError(f"{n} groups: at least one is needed")
    if count <= 2 * n:
        return np.arange(count)
    size = -(-count // n)
    rows = -(-count // size)
    padded = np.full(rows * size, np.nan)
    padded[:count] = y
    groups = padded.reshape(rows, size)
    finite = np.isfinite(groups)
    real = (np.arange(rows * size) < count).reshape(rows, size)
    starts = np.arange(rows) * size
    some = finite.any(axis=1)
    lowest = starts + np.where(finite, groups, np.inf).argmin(axis=1)
    highest = starts + np.where(finite, groups, -np.inf).argmax(axis=1)
    missing = ~finite & real
    gone = starts + missing.argmax(axis=1)
    chosen = [lowest[some], highest[some], gone[missing.any(axis=1)], np.array([0, count - 1])]
    return np.unique(np.concatenate(chosen)).astype(np.int64)


def group_starts(count: int, n: int) -> Indices:
    """Where each of at most `n` groups of neighbours begins, for `ufunc.reduceat`."""
    size = max(-(-count // n), 1)
    return np.arange(0, count, size, dtype=np.int64)
