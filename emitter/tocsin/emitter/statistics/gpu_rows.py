"""Full rows of tensors on a GPU: everything in one tensor there, so that it is asked once.

Nothing waits. A few reductions are queued for all tensors of a size together; the host finishes the
arithmetic when the copy has come, steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.statistics.arrays import Doubles, Rows, as_float32
from tocsin.emitter.statistics.stacks import stacks
from tocsin.schemas.records.frames import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts

CHUNK: Final = 1 << 26
"""Elements that are reduced together: what bounds the memory of a copy in a wider type."""

_CELLS: Final = 7  # sum, l2, l1, min, max, variance, how many are not zero


class PackedRows:
    """Rows of tensors `[n]` on one device, in two steps.

    `packed`, `[7 * parts]`, float64, is queued when the constructor returns; it is None if all
    tensors are empty. `rows` turns a copy of it on the host into statistics. Reads the tensors only
    once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._numel = np.array([tensor.numel() for tensor in tensors], np.uint64)
        self._owner: list[int] = []
        self._size: list[int] = []
        self.packed: Final[torch.Tensor | None] = self._queue(tensors)

    def _queue(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        cells: list[torch.Tensor] = []
        for at, rows in stacks(tensors, chunk=CHUNK):
            self._owner += at
            self._size += [rows.shape[1]] * len(at)
            x = rows if rows.dtype in (torch.float32, torch.float64) else _wide(rows)
            norm = torch.linalg.vector_norm
            low, high = torch.aminmax(x, dim=1)
            variance = torch.var(x, dim=1, correction=0)
            found = (x.sum(1), norm(x, dim=1), norm(x, 1, dim=1), low, high, variance)
            # float64 holds counts of up to 2**53.
            filled = torch.count_nonzero(x, dim=1)
            cells.append(torch.cat((torch.stack(found).double(), filled[None].double())))
            del rows, x  # before the next stack is made
        return torch.cat(cells, dim=1).reshape(-1) if cells else None

    def rows(self, copied: Doubles) -> Rows:
        """The statistics, of a copy of `packed` in its shape. Counts of NaN and infinities are
        lower bounds: 1 where there is at least one; such a row's statistics are zeros.
        """
        n = len(self._numel)
        values = np.zeros((n, len(STATISTIC_COLUMNS)), np.float64)
        counts = np.zeros((n, len(COUNT_COLUMNS)), np.uint64)
        counts[:, 0] = self._numel
        if not self._owner:
            return Rows(as_float32(values), counts)
        order = np.argsort(self._owner, kind="stable")
        cells = copied.reshape(_CELLS, -1)[:, order]
        total, l2, l1, low, high, variance, filled = cells
        owner = np.array(self._owner)[order]
        size = np.array(self._size, np.float64)[order]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        at = owner[first]
        numel = self._numel[at].astype(np.float64)
        add = np.add.reduceat
        with np.errstate(all="ignore"):
            sums, squares = add(total, first), add(l2**2, first)
            mean = sums / numel
            lengths = np.diff(first, append=len(owner))
            apart = total / size - np.repeat(mean, lengths)
            spread = add(size * (variance + apart**2), first)
            lowest, highest = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
            values[at] = np.column_stack(
                (
                    lowest,
                    highest,
                    mean,
                    np.sqrt(spread / numel),
                    add(l1, first),
                    np.sqrt(squares),
                    np.maximum(np.abs(lowest), np.abs(highest)),
                )
            )
        counts[at, 1] = (numel - add(filled, first)).astype(np.uint64)
        _bounds(values, counts, at[~np.isfinite(values[at]).all(axis=1)])
        return Rows(as_float32(values), counts)


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.float() if part.is_floating_point() else part.double()


def _bounds(values: Doubles, counts: Counts, nonfinite: npt.NDArray[np.int64]) -> None:
    """Rows with NaN or infinities whose tensors are gone: counts are lower bounds."""
    for i in nonfinite:
        row = values[i]
        is_nan = bool(np.isnan(row[0]) or np.isnan(row[1]))
        counts[i, 2] = int(is_nan)
        counts[i, 3] = int(not is_nan and bool(np.isinf(row[0]) or np.isinf(row[1])))
        values[i] = np.where(np.isfinite(row), row, 0)
