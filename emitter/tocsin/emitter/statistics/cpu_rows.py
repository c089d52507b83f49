"""Full rows of tensors on the CPU, in one pass over memory and on one thread.

A training leaves its gradients and weights in memory, not in the cache: reading them once bounds
what a summary can cost (0.19 ns per float32 number here, against 0.05 for each reduction of numbers
in the cache). So all reductions read one chunk while it is in the cache; NumPy's are taken, which
cost half of PyTorch's to call and never start threads. Whether there is a zero at all is asked of
the smallest |x| (0.05 ns): to count them takes twice as long, by count_nonzero nine times.

Small tensors are put together and summarised in float64 by a dozen calls for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.statistics.arrays import Doubles, ExactRow, Rows, as_float32, square_sum
from tocsin.schemas.records.frames import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts

SMALL: Final = 4096
"""Tensors of up to so many elements are summarised together, in float64."""

LARGE_CHUNK: Final = 1 << 18
"""Elements that are read while they are in the second-level cache (1 MB of it)."""

SCRATCH: Final = 1 << 17
"""Elements whose absolute values are kept beside them."""

CANCELLATION: Final = 1e-2
"""Below this share of the mean square, a variance from sum and norm is too inexact in float32."""

SINGLE: Final = 1 << 15
"""Elements that PyTorch converts at once: with one more it takes a second thread."""

_BATCH: Final = 1 << 16

Array = npt.NDArray[Any]
_numpy_types: Final = frozenset(
    (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)


def host_rows(tensors: Sequence[torch.Tensor]) -> Rows:
    """Rows of tensors on the CPU, each `[n]`, as `dense` returns them. Never starts a thread."""
    values = np.zeros((len(tensors), len(STATISTIC_COLUMNS)), np.float64)
    counts = np.zeros((len(tensors), len(COUNT_COLUMNS)), np.uint64)
    small: list[int] = []
    arrays: list[Array] = []
    gathered = 0
    scratch: dict[np.dtype[Any], Array] = {}  # fresh memory for each tensor costs a tenth of it all
    with np.errstate(all="ignore"):
        for i, tensor in enumerate(tensors):
            n = tensor.numel()
            if n > SMALL:
                values[i], counts[i] = _large_row(tensor, n, scratch)
            elif n:
                if gathered + n > _BATCH:
                    _small_rows(arrays, small, values, counts)
                    small, arrays, gathered = [], [], 0
                small.append(i)
                arrays.append(as_numpy(tensor))
                gathered += n
        if small:
            _small_rows(arrays, small, values, counts)
    return Rows(as_float32(values), counts)


def as_numpy(tensor: torch.Tensor) -> Array:
    """The numbers of a tensor `[n]` that `dense` returned, as an array `[n]`.

    A copy in float32 of types that NumPy lacks, or computes slowly (float16).
    """
    if tensor.dtype in _numpy_types:
        return tensor.numpy()  # type: ignore[no-any-return]  # torch has no types here
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8).numpy()  # type: ignore[no-any-return]
    if tensor.is_floating_point():
        return tensor.float().numpy()  # type: ignore[no-any-return]
    return tensor.double().numpy()  # type: ignore[no-any-return]  # uint16, uint32, uint64


def exact_row(tensor: torch.Tensor) -> tuple[Doubles, Counts]:
    """The statistics `[7]` in float64, and exact counts `[4]`, of a tensor of any shape.

    Over the finite values. Slow: 2 ns per element. Waits for a tensor that is on a GPU.
    """
    exact = ExactRow()
    for chunk in tensor.detach().split(SINGLE):
        exact.add(chunk.double().cpu().numpy())
    return exact.row()


def _small_rows(
    arrays: Sequence[Array], at: Sequence[int], values: Doubles, counts: Counts
) -> None:
    """Rows of tensors that are not empty, into the rows `at`."""
    size = np.array([array.size for array in arrays])
    first = np.concatenate(([0], np.cumsum(size[:-1])))
    x: Doubles = np.concatenate(arrays, dtype=np.float64, casting="unsafe")
    add = np.add.reduceat
    low, high = np.minimum.reduceat(x, first), np.maximum.reduceat(x, first)
    mean = add(x, first) / size
    positive = np.abs(x)
    l1 = add(positive, first)
    squares = add(x * x, first)
    apart = x - np.repeat(mean, size)
    std = np.sqrt(add(apart * apart, first) / size)
    values[at] = np.column_stack(
        (low, high, mean, std, l1, np.sqrt(squares), np.maximum(np.abs(low), np.abs(high)))
    )
    counts[at, 0] = size
    # fmin: a NaN in one tensor must not hide the others.
    if np.fmin.reduce(positive) == 0:
        counts[at, 1] = add(x == 0, first, dtype=np.uint64)
    finite = np.isfinite(std) & np.isfinite(squares)
    if not finite.all():
        for i in np.flatnonzero(~finite).tolist():
            exact = ExactRow()
            exact.add(x[first[i] : first[i] + size[i]])
            values[at[i]], counts[at[i]] = exact.row()


def _large_row(
    tensor: torch.Tensor, n: int, scratch: dict[np.dtype[Any], Array]
) -> tuple[Sequence[float] | Doubles, Sequence[int] | Counts]:
    total = squares = l1 = 0.0
    zeros = 0
    low, high = np.inf, -np.inf
    least, most, absolute, add = np.minimum.reduce, np.maximum.reduce, np.abs, np.einsum
    for x in _chunks(tensor, n):
        kept = scratch.get(x.dtype)
        if kept is None:
            kept = scratch[x.dtype] = np.empty(SCRATCH, x.dtype)
        total += float(add("i->", x))
        squares += square_sum(x)
        low, high = min(low, float(least(x))), max(high, float(most(x)))
        for start in range(0, x.size, SCRATCH):
            part = x[start : start + SCRATCH]
            positive = kept[: part.size]
            absolute(part, out=positive)
            l1 += float(add("i->", positive))
            if least(positive) == 0:
                zeros += int(np.count_nonzero(part == 0))
    mean, mean_square = total / n, squares / n
    if not math.isfinite(total + squares + l1):
        return exact_row(tensor)
    variance = mean_square - mean * mean
    if variance < CANCELLATION * mean_square:
        variance = _variance(tensor, n, mean)
    row = (low, high, mean, variance**0.5, l1, squares**0.5, max(-low, high))
    return row, (n, zeros, 0, 0)


def _chunks(tensor: torch.Tensor, n: int) -> Iterator[Array]:
    """Its numbers as float32, or float64 where those are not enough."""
    kept = tensor.dtype in (torch.float32, torch.float64)
    if kept:
        array = as_numpy(tensor)
        for start in range(0, n, LARGE_CHUNK):
            yield array[start : start + LARGE_CHUNK]
        return
    wide = torch.float32 if tensor.is_floating_point() else torch.float64
    buffer = torch.empty(min(n, SCRATCH), dtype=wide, device="cpu")
    for start in range(0, n, SCRATCH):
        part = tensor[start : start + SCRATCH]
        held = buffer[: part.numel()]
        for to, source in zip(held.split(SINGLE), part.split(SINGLE), strict=True):
            to.copy_(source)
        yield held.numpy()


def _variance(tensor: torch.Tensor, n: int, mean: float) -> float:
    """Around the mean, in a second pass."""
    squares = shift = 0.0
    for x in _chunks(tensor, n):
        apart = x - x.dtype.type(mean)
        squares += square_sum(apart)
        shift += float(np.einsum("i->", apart))
    return max(squares / n - (shift / n) * (shift / n), 0.0)
