"""What is read of an activation: a part of it that is evenly spread, and statistics of that part.

All is taken from tensors without a graph. Nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.statistics.arrays import Doubles, ExactRow

MAX_SAMPLES: Final = 16_384
"""Values of one tensor that are looked at."""

BLOCKS: Final = 64
"""Pieces in equal distance that a larger tensor's sample is made of, of 256 values each: of single
values each would cost a line of the cache."""

CERTAIN: Final = 1e-3
"""A row of a softmax is saturated whose largest value is nearer to 1."""

MAX_ROWS: Final = 256

CANCELLATION: Final = 1e-3
"""Below this share of the mean square, a variance from sum and norm is too inexact in float32."""

Sample: TypeAlias = npt.NDArray[np.float32] | Doubles


def spread(tensor: torch.Tensor, most: int = MAX_SAMPLES) -> torch.Tensor:
    """Up to `most` values of a tensor of any shape: `[n]`, a copy, float32 (float64 stays)."""
    if not tensor.is_contiguous():
        # Channels last, transposed, …: without gaps in memory it is contiguous in another order.
        # What is there many times (expanded) is looked at once.
        stride = tensor.stride()
        tensor = tensor[tuple(slice(None) if step else slice(1) for step in stride)]
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -stride[d]))
    n = tensor.numel()
    if n > most and not tensor.is_contiguous():
        return spread(thinned(tensor, most).contiguous(), most)
    if n > most:
        apart, block = n // BLOCKS, most // BLOCKS
        tensor = tensor.view(-1)[: apart * BLOCKS].view(BLOCKS, apart)[:, :block]
    kept = tensor.dtype if tensor.dtype is torch.float64 else torch.float32
    return tensor.to(kept, copy=True).reshape(-1)


def thinned(tensor: torch.Tensor, most: int, *, whole: int = 0) -> torch.Tensor:
    """A view of a tensor of any shape with every n-th index of the first dimensions; the last
    `whole` dimensions stay.

    The first dimensions have about `most` elements together.
    """
    free = tensor.dim() - whole
    for d in sorted(range(free), key=lambda d: -tensor.shape[d]):
        places = math.prod(tensor.shape[:free])
        if places <= most:
            break
        step = min(tensor.shape[d], max(1, places // most))
        tensor = tensor[(slice(None),) * d + (slice(None, None, step),)]
    return tensor


def rows_of(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """About `most` evenly spread rows of a tensor `[..., width]`: `[rows, width]`, float32."""
    width = tensor.shape[-1]
    if tensor.is_contiguous():
        flat = tensor.view(-1, width)
        step = max(1, flat.shape[0] // most)
        if step > 1 and tensor.dim() > 2 and step % tensor.shape[-2] == 0:
            step += 1  # not the same place of each sequence
        return flat[::step].float()
    return thinned(tensor, most, whole=1).reshape(-1, width).float()


def statistics(sample: Sample) -> tuple[Doubles, npt.NDArray[np.uint64]]:
    """STATISTIC_COLUMNS (of finite values) `[7]` and COUNT_COLUMNS `[4]` of a sample `[n]`."""
    n = sample.size
    if n == 0:
        return np.zeros(7), np.zeros(4, np.uint64)
    with np.errstate(all="ignore"):
        squares = float(np.dot(sample, sample))
        if not math.isfinite(squares):
            exact = ExactRow()
            exact.add(sample.astype(np.float64))
            return exact.row()
        size = np.abs(sample)
        low, high = float(sample.min()), float(sample.max())
        mean = float(sample.sum()) / n
        variance = squares / n - mean * mean
        if variance < CANCELLATION * squares / n:
            variance = float(np.var(sample, dtype=np.float64))
        values = np.array(
            (
                low,
                high,
                mean,
                math.sqrt(max(0.0, variance)),
                float(size.sum()),
                math.sqrt(squares),
                max(abs(low), abs(high)),
            )
        )
    counts = np.array((n, n - np.count_nonzero(sample), 0, 0), np.uint64)
    return values, counts


def share_beyond(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The share of a sample of any shape that is at most `low` or at least `high`, a scalar; NaN if
    it has a NaN."""
    beyond = ((values <= low) | (values >= high)).mean(dtype=torch.float32)
    return torch.where(values.isnan().any(), torch.nan, beyond)


def certainty(probabilities: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of a softmax's rows that are nearly one-hot, and their mean entropy (nats), both
    scalars.

    Args:
        probabilities: any shape; the softmax is over `dim`.
    """
    rows = rows_of(probabilities.movedim(dim, -1), MAX_ROWS)
    sure = (rows.amax(dim=-1) > 1 - CERTAIN).mean(dtype=torch.float32)
    entropy = torch.special.entr(rows).sum(dim=-1).mean()
    return sure + 0.0 * entropy, entropy
