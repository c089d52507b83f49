"""How much of a float16, bfloat16 or float8 tensor is at the ends of its type's range.

`underflow` is the share, of the numbers that are not zero, of those smaller than the type's
smallest normal one: they have lost digits, and what is smaller still is zero. `overflow` is the
share, of all numbers, of those above 0.9 of the largest, infinities among them. Both are exact:
read from the bits, which stand in the order of the numbers, without a conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch

from tocsin.emitter.statistics.arrays import CHUNK as HOST_CHUNK
from tocsin.emitter.statistics.arrays import as_float32
from tocsin.emitter.statistics.async_copy import HostCopy, by_device
from tocsin.emitter.statistics.stacks import stacks
from tocsin.schemas.records.frames import Counts, Floats

LOW_PRECISION_COLUMNS: Final = ("underflow", "overflow")

NEAR_LARGEST: Final = 0.9

CHUNK: Final = 1 << 26
"""Elements that a GPU looks at together: a copy of their bits is made."""

_NAMES: Final = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
_TYPES: Final = frozenset(
    getattr(torch, name) for name in (*_NAMES, "float8_e5m2fnuz") if hasattr(torch, name)
)


@dataclass(frozen=True, slots=True)
class _Bits:
    """A type's limits, as bits without the sign."""

    whole: torch.dtype
    mask: int
    normal: int
    near_largest: int
    infinite: int
    """The largest bits that are no NaN."""


@cache
def _bits(dtype: torch.dtype) -> _Bits:
    whole = torch.uint8 if dtype.itemsize == 1 else torch.int16
    mask = 0x7F if dtype.itemsize == 1 else 0x7FFF
    every = torch.arange(mask + 1, dtype=torch.int32).to(whole).view(dtype).float()
    limits = torch.finfo(dtype)
    return _Bits(
        whole,
        mask,
        normal=int((every < limits.smallest_normal).sum()),
        near_largest=int((every <= NEAR_LARGEST * limits.max).sum()) - 1,
        infinite=int((~every.isnan()).sum()) - 1,
    )


class LowPrecision:
    """How much of each tensor of low precision, `[n]`, is at the ends of its type's range.

    Other tensors are left out. Of those on a GPU it comes later.
    """

    def __init__(self, names: Sequence[str], flat: Sequence[torch.Tensor]) -> None:
        kept = [i for i, tensor in enumerate(flat) if tensor.dtype in _TYPES]
        self.names: Final = tuple(names[i] for i in kept)
        """Those that are of low precision, in the order given."""
        self._numel: Counts = np.array([flat[i].numel() for i in kept], np.uint64)
        self._counts = np.zeros((len(kept), 3), np.int64)  # zeros, below normal, near the largest
        self._copies: list[tuple[list[int], HostCopy]] = []
        elsewhere: list[int] = []
        with torch.no_grad():
            for row, i in enumerate(kept):
                if flat[i].is_cpu:
                    self._counts[row] = _on_host(flat[i])
                else:
                    elsewhere.append(row)
            tensors = [flat[kept[row]] for row in elsewhere]
            for places in by_device(tensors).values():
                at: list[int] = []
                cells: list[torch.Tensor] = []
                for of, rows in stacks([tensors[i] for i in places], chunk=CHUNK):
                    at += [elsewhere[places[i]] for i in of]
                    cells.append(_on_device(rows))
                    del rows  # before the next stack is made
                if at:
                    self._copies.append((at, HostCopy(torch.cat(cells))))

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return all(copy.ready() for _, copy in self._copies)

    @property
    def rows(self) -> tuple[Floats, Counts]:
        """LOW_PRECISION_COLUMNS `[names, 2]`, and `numel` `[names, 1]`, once they are ready."""
        for at, copy in self._copies:
            np.add.at(self._counts, at, copy.values().astype(np.int64).reshape(-1, 3))
        self._copies.clear()
        zeros, small, large = self._counts.T.astype(np.float64)
        numel = self._numel.astype(np.float64)
        shares = np.stack(
            (small / np.maximum(numel - zeros, 1), large / np.maximum(numel, 1)), axis=1
        )
        return as_float32(shares), self._numel.reshape(-1, 1)


def _on_host(tensor: torch.Tensor) -> tuple[int, int, int]:
    limits = _bits(tensor.dtype)
    whole = tensor.view(limits.whole).numpy()
    count = np.count_nonzero
    zeros = small = large = 0
    for start in range(0, whole.size, HOST_CHUNK):
        bits = whole[start : start + HOST_CHUNK] & limits.mask
        none = int(count(bits == 0))
        zeros += none
        small += int(count(bits < limits.normal)) - none
        near = int(count(bits > limits.near_largest))
        if near:
            large += near - int(count(bits > limits.infinite))
    return zeros, small, large


def _on_device(rows: torch.Tensor) -> torch.Tensor:
    """Zeros, numbers below the smallest normal one, and near the largest, of each row: `[n, 3]`."""
    limits = _bits(rows.dtype)
    bits = rows.view(limits.whole) & limits.mask
    small = (bits > 0) & (bits < limits.normal)
    large = (bits > limits.near_largest) & (bits <= limits.infinite)
    return torch.stack([(bits == 0).sum(1), small.sum(1), large.sum(1)], dim=1)
