"""Rows of statistics of any arrays, with exact counts. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.frames import STATISTIC_COLUMNS, Counts, Floats

Doubles = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

CHUNK: Final = 1 << 16
"""Elements that are looked at together, in float64 and in the cache."""


BLOCK: Final = 8192
"""Elements of one dot product. From 10,000 on OpenBLAS takes more threads, which are waited for: 60
times as long where all cores are busy."""

_vecdot: Final[Callable[[Array, Array], Array] | None] = getattr(np, "vecdot", None)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Full rows of T tensors.

    Attributes:
        values: `[T, 7]`, float32, the STATISTIC_COLUMNS.
        counts: `[T, 4]`, uint64, the COUNT_COLUMNS.
    """

    values: Floats
    counts: Counts

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Which tensors have a NaN or an infinity: `[T]`."""
        bad: npt.NDArray[np.bool_] = (self.counts[:, 2] + self.counts[:, 3]) > 0
        return bad


def block(turn: int, n: int) -> slice:
    """The part of `n` elements whose turn it is: at most `BLOCK` of them, each part as large as the
    others, and all of them in as many turns as there are parts.
    """
    parts = -(-n // BLOCK)
    i = turn % parts if parts else 0
    return slice(i * n // parts, (i + 1) * n // parts) if parts else slice(0, 0)


def square_sum(flat: Array) -> float:
    """Sum of squares of `[n]` floats, in float64 over runs that are summed in their own type."""
    whole = flat.size - flat.size % BLOCK
    runs, rest = flat[:whole].reshape(-1, BLOCK), flat[whole:]
    # NumPy 1 has no vecdot.
    squares = np.einsum("ij,ij->i", runs, runs) if _vecdot is None else _vecdot(runs, runs)
    total: float = sum(squares.tolist())
    return total + float(np.dot(rest, rest)) if rest.size else total


class ExactRow:
    """Adds up one tensor, chunk by chunk, in float64. Statistics are over the finite values.

    The variances of the chunks are joined as by Chan, Golub and LeVeque (1979).
    """

    def __init__(self) -> None:
        self._low, self._high = np.inf, -np.inf
        self._mean = self._spread = self._squares = self._l1 = 0.0
        self._numel = self._finite = self._zeros = self._nans = 0

    def add(self, chunk: Doubles) -> None:
        """Take one more chunk, `[n]`."""
        finite = np.isfinite(chunk)
        n = int(np.count_nonzero(finite))
        good = chunk if n == chunk.size else chunk[finite]
        self._numel += chunk.size
        if n < chunk.size:
            self._nans += int(np.count_nonzero(np.isnan(chunk)))
        if n == 0:
            return
        self._low = min(self._low, float(good.min()))
        self._high = max(self._high, float(good.max()))
        self._zeros += n - int(np.count_nonzero(good))
        with np.errstate(over="ignore", invalid="ignore"):
            self._squares += square_sum(good)
            self._l1 += float(np.abs(good).sum())
            # Chunk by chunk around its own mean: the difference of two large sums would cancel.
            mean = float(good.mean())
            apart = good - mean
            before, self._finite = self._finite, self._finite + n
            shift = mean - self._mean
            self._mean += shift * n / self._finite
            self._spread += square_sum(apart) + shift * shift * before * n / self._finite

    def row(self) -> tuple[Doubles, Counts]:
        """STATISTIC_COLUMNS `[7]`, zeros where nothing is finite, and COUNT_COLUMNS `[4]`."""
        infs = self._numel - self._finite - self._nans
        counts = np.array((self._numel, self._zeros, self._nans, infs), np.uint64)
        if self._finite == 0:
            return np.zeros(len(STATISTIC_COLUMNS)), counts
        std = np.sqrt(self._spread / self._finite)
        largest = max(abs(self._low), abs(self._high))
        l2 = np.sqrt(self._squares)
        row = np.array((self._low, self._high, self._mean, std, self._l1, l2, largest))
        return np.nan_to_num(row), counts


def is_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of that type are of numbers; those of ml_dtypes (bfloat16, float8, int4) are,
    which NumPy knows by nothing but that they can be cast.
    """
    return dtype.kind in "biufc" or (dtype.type.__module__ == "ml_dtypes")


def real_numbers(array: Array) -> Array:
    """The numbers of an array of any shape, as `[n]`; of complex ones the real and imaginary parts
    side by side.

    A view where the memory has no gaps; in the order of the memory, not of the indices.

    Raises:
        TypeError: its elements are no numbers.
    """
    if not is_numbers(array.dtype):
        raise TypeError(f"expected an array of numbers, found {array.dtype}")
    flat = array.ravel("K")
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    return flat


def row_of(array: Array) -> tuple[Doubles, Counts]:
    """The statistics `[7]`, float64, and counts `[4]` of an array of any shape and type of number.

    Takes memory for one chunk, and for a copy if the array has gaps.

    Raises:
        TypeError: its elements are no numbers.
    """
    flat = real_numbers(array)
    exact = ExactRow()
    for start in range(0, flat.size, CHUNK):
        exact.add(flat[start : start + CHUNK].astype(np.float64))
    return exact.row()


def as_float32(values: Doubles) -> Floats:
    """An array of any shape in float32; what is beyond its range becomes its largest number."""
    limit = float(np.finfo(np.float32).max)
    return narrowed(np.clip(values, -limit, limit))


def narrowed(values: Array) -> Floats:
    """An array of any shape in float32; what is too small for it is zero, also where the user lets
    NumPy raise for that (`numpy.seterr`).
    """
    with np.errstate(all="ignore"):
        return values.astype(np.float32)
