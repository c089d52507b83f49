"""A row of statistics of any array, in float64 and with exact counts. Knows nothing of torch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.telemetry import STATISTIC_COLUMNS, Counts

Doubles = npt.NDArray[np.float64]

CHUNK: Final = 1 << 20


class ExactRow:
    """Adds up one tensor, chunk by chunk. Statistics are over the finite values."""

    def __init__(self) -> None:
        self._low, self._high = np.inf, -np.inf
        self._total = self._squares = self._l1 = 0.0
        self._numel = self._zeros = self._nans = self._infs = 0

    def add(self, chunk: Doubles) -> None:
        """Take one more chunk, flat."""
        good = chunk[np.isfinite(chunk)]
        nans = int(np.isnan(chunk).sum())
        self._numel += chunk.size
        self._nans += nans
        self._infs += chunk.size - good.size - nans
        if good.size:
            self._low = min(self._low, float(good.min()))
            self._high = max(self._high, float(good.max()))
            self._total += float(good.sum())
            self._squares += float(np.dot(good, good))
            self._l1 += float(np.abs(good).sum())
            self._zeros += good.size - int(np.count_nonzero(good))

    def row(self) -> tuple[Doubles, Counts]:
        """STATISTIC_COLUMNS, zeros where nothing is finite, and COUNT_COLUMNS."""
        counts = np.array((self._numel, self._zeros, self._nans, self._infs), np.uint64)
        finite = self._numel - self._nans - self._infs
        if finite == 0:
            return np.zeros(len(STATISTIC_COLUMNS)), counts
        mean = self._total / finite
        std = float(np.sqrt(max(self._squares / finite - mean**2, 0.0)))
        largest = max(abs(self._low), abs(self._high))
        l2 = float(np.sqrt(self._squares))
        return np.array((self._low, self._high, mean, std, self._l1, l2, largest)), counts


def row_of(array: npt.NDArray[Any]) -> tuple[Doubles, Counts]:
    """The row of one array.

    Raises:
        TypeError: its elements are no numbers.
    """
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise TypeError(f"expected an array of numbers, found {array.dtype}")
    flat = array.reshape(-1)
    if np.iscomplexobj(flat):
        flat = np.stack((flat.real, flat.imag), axis=-1).reshape(-1)
    exact = ExactRow()
    for start in range(0, flat.size, CHUNK):
        exact.add(flat[start : start + CHUNK].astype(np.float64))
    return exact.row()
