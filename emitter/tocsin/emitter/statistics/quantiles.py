"""Quantiles of arrays, from a sample of each. Knows nothing of torch.

A sample is the whole array up to 1,024 numbers, else 32 blocks of 32 neighbours in equal distance:
the same places each time, so that what has not changed has the same quantiles. The share of an
array's numbers that are below its sampled median is 50 ± 1.6 percent (one standard deviation, of
numbers in no order), below its p05 and p95 ± 0.7: four times as many numbers would halve that and
cost four times as much. The samples are sorted many in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tocsin.emitter.statistics.arrays import Doubles, as_float32
from tocsin.schemas.records.frames import STATISTIC_COLUMNS, Floats

QUANTILES: Final = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
"""The columns, and the share of numbers below each."""

ROW_COLUMNS: Final = (*STATISTIC_COLUMNS, *QUANTILES)
"""The columns of a full row, beside the counts."""

BLOCKS: Final = 32
BLOCK: Final = 32
SAMPLE: Final = BLOCKS * BLOCK

_BATCH: Final = 1 << 17

Array = npt.NDArray[Any]


def sample_of(flat: Array) -> Array:
    """The sample of an array `[n]`: itself, or `[32, 32]` of more than 1,024 numbers; a view."""
    if flat.size <= SAMPLE:
        return flat
    apart = flat.size // BLOCKS
    return flat[: apart * BLOCKS].reshape(BLOCKS, apart)[:, :BLOCK]


def quantile_rows(samples: Sequence[Array]) -> Floats:
    """QUANTILES of the finite numbers of each array: `[arrays, 5]`; zeros where there are none.

    The arrays are real and of any shape. Between two numbers they are interpolated, as NumPy does.
    """
    found = np.zeros((len(samples), len(QUANTILES)), np.float64)
    # Those of a size together: rows of one matrix, with NaN at their ends, which is sorted last.
    order = sorted(range(len(samples)), key=lambda i: samples[i].size)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * samples[i].size > _BATCH:
            found[batch] = _batch_quantiles([samples[j] for j in batch])
            batch = []
        batch.append(i)
    if batch:
        found[batch] = _batch_quantiles([samples[j] for j in batch])
    return as_float32(found)


def _batch_quantiles(samples: Sequence[Array]) -> Doubles:
    size = np.array([sample.size for sample in samples])
    wide = any(sample.dtype.itemsize > 4 for sample in samples)
    matrix = np.full((len(samples), max(int(size.max()), 1)), np.nan, "f8" if wide else "f4")
    for row, sample in zip(matrix, samples, strict=True):
        into = row[: sample.size]
        into.reshape(sample.shape)[...] = sample
    matrix.sort(axis=1)
    rows = np.arange(len(samples))
    last = matrix[rows, np.maximum(size - 1, 0)]
    nonfinite = ~(np.isfinite(matrix[:, 0]) & np.isfinite(last))
    for i in np.flatnonzero(nonfinite).tolist():
        good = matrix[i][np.isfinite(matrix[i])]
        size[i] = good.size
        matrix[i, : good.size] = good
    shares = np.array([*QUANTILES.values()])
    at = shares * np.maximum(size - 1, 0)[:, None]
    below = np.floor(at).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(size - 1, 0)[:, None])
    low = matrix[rows[:, None], below].astype(np.float64)
    high = matrix[rows[:, None], above].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        values: Doubles = low + (high - low) * (at - below)
    values[size == 0] = 0
    return values
