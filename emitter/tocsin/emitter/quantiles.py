"""Quantiles of tensors, from a sample of each.

A sample is the whole tensor up to 1,024 numbers, else 32 blocks of 32 neighbours in equal distance:
the same places each time, so that what has not changed has the same quantiles. The share of a
tensor's numbers that are below its sampled median is 50 ± 1.6 percent (one standard deviation, of
numbers in no order), below its p05 and p95 ± 0.7: four times as many numbers would halve that and
cost four times as much. The samples are sorted on the host, many in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.arrays import Doubles, as_float32
from tocsin.emitter.host_copy import HostCopy
from tocsin.emitter.host_rows import as_numpy
from tocsin.schemas.telemetry import Floats

QUANTILES: Final = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
"""The columns, and the share of numbers below each."""

BLOCKS: Final = 32
BLOCK: Final = 32
SAMPLE: Final = BLOCKS * BLOCK

_BATCH: Final = 1 << 17

Array = npt.NDArray[Any]


class Quantiles:
    """Quantiles of flat tensors. On a GPU they come later."""

    def __init__(self, flat: Sequence[torch.Tensor]) -> None:
        self._numel = [tensor.numel() for tensor in flat]
        self._copies: list[tuple[list[int], HostCopy]] = []
        self._rows: Floats | None = None
        with torch.no_grad():
            samples = [_sample(tensor) for tensor in flat]
            if all(tensor.is_cpu for tensor in flat):
                self._rows = quantile_rows([as_numpy(sample) for sample in samples])
                return
            places: dict[torch.device, list[int]] = {}
            for i, tensor in enumerate(flat):
                places.setdefault(tensor.device, []).append(i)
            for at in places.values():
                together = torch.cat([samples[i].reshape(-1).float() for i in at])
                self._copies.append((at, HostCopy(together)))

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return all(copy.ready() for _, copy in self._copies)

    @property
    def rows(self) -> Floats:
        """float32[tensors, QUANTILES], once they are ready."""
        if self._rows is None:
            samples: list[Doubles] = [np.zeros(0)] * len(self._numel)
            for at, copy in self._copies:
                ends = np.cumsum([min(self._numel[i], SAMPLE) for i in at])
                for i, sample in zip(at, np.split(copy.values(), ends[:-1]), strict=True):
                    samples[i] = sample
            self._rows = quantile_rows(samples)
            self._copies.clear()
        return self._rows


def quantile_rows(samples: Sequence[Array]) -> Floats:
    """QUANTILES of the finite numbers of each array; zeros where there are none.

    Between two numbers they are interpolated, as NumPy does.
    """
    found = np.zeros((len(samples), len(QUANTILES)), np.float64)
    # Those of a size together: rows of one matrix, with NaN at their ends, which is sorted last.
    order = sorted(range(len(samples)), key=lambda i: samples[i].size)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * samples[i].size > _BATCH:
            found[batch] = _of_batch([samples[j] for j in batch])
            batch = []
        batch.append(i)
    if batch:
        found[batch] = _of_batch([samples[j] for j in batch])
    return as_float32(found)


def _of_batch(samples: Sequence[Array]) -> Doubles:
    size = np.array([sample.size for sample in samples])
    wide = any(sample.dtype.itemsize > 4 for sample in samples)
    matrix = np.full((len(samples), max(int(size.max()), 1)), np.nan, "f8" if wide else "f4")
    for row, sample in zip(matrix, samples, strict=True):
        into = row[: sample.size]
        into.reshape(sample.shape)[...] = sample
    matrix.sort(axis=1)
    rows = np.arange(len(samples))
    last = matrix[rows, np.maximum(size - 1, 0)]
    odd = ~(np.isfinite(matrix[:, 0]) & np.isfinite(last))
    for i in np.flatnonzero(odd).tolist():
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


def _sample(flat: torch.Tensor) -> torch.Tensor:
    n = flat.numel()
    if n <= SAMPLE:
        return flat
    apart = n // BLOCKS
    return flat[: apart * BLOCKS].view(BLOCKS, apart)[:, :BLOCK]
