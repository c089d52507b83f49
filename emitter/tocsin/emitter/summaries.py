"""Tensors in, rows of statistics out.

Two depths: `norms` (one reduction per tensor, each step) and `Summary` (a full row per tensor,
every N steps). Both put all their results into one tensor first, so that a GPU is asked once and
never waited for; on the CPU the values are there at once.

Why these operations (CPU, 262k float32, ns per element): sum 0.03, vector_norm 0.07, |x| into a
buffer and its sum 0.08, aminmax 0.08, count_nonzero 0.13; but isnan + sum 0.40, std 0.35,
vector_norm(inf) 1.40. So non-finiteness is derived from the sum and the norm, and what is exact and
slow runs only for a tensor that is odd.

The standard deviation (over all values, not the sample's) comes from sum and norm, except where
that would cancel: a LayerNorm weight of 1 ± 1e-3 would be 18 % wrong in float32. There it is
computed directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.arrays import CHUNK as CHUNK_EXACT
from tocsin.emitter.arrays import Doubles, ExactRow
from tocsin.schemas.telemetry import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts, Floats

CHUNK: Final = 1 << 15
"""Elements that all reductions read while they are in the cache (CPU). Up to here torch uses one
thread: where the cores are busy, waiting for a second one costs 100 times the reduction."""

CANCELLATION: Final = 1e-3
"""Below this share of the mean square, a variance from sum and norm is too inexact in float32."""

_WIDE: Final = (torch.float32, torch.float64)
_PARTS: Final = 5  # sum, l2, l1, min, max


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor as this rank holds them, flat and real; None if it has none to read
    (meta, quantised, …).

    A DTensor gives its local part, a sparse tensor the values it stores, a complex one its real and
    imaginary parts side by side. Never a graph, and a copy only where the layout forces one.
    """
    local = getattr(tensor, "to_local", None)
    if local is not None:
        tensor = local()
    tensor = tensor.detach()
    if tensor.is_meta or tensor.is_quantized or tensor.layout is torch.jagged:
        return None
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.is_nested:
        return None
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Channels last, transposed, …: without gaps in memory it is contiguous in another order.
    stride = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -stride[d]))
    return ordered.view(-1) if ordered.is_contiguous() else tensor.reshape(-1)


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of each flat tensor, float32[len(tensors)], on the tensors' own device.

    A NaN or an infinity in a tensor makes its norm so too. All must live on one device.
    """
    return torch.stack([_norm(tensor) for tensor in tensors])


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.float32:
        return torch.linalg.vector_norm(tensor)
    if tensor.dtype is torch.float64:
        return torch.linalg.vector_norm(tensor).float()
    if tensor.dtype.itemsize == 1:  # float8 has no reductions
        tensor = tensor.float()
    # A float16 norm of 1e6 values near 300 is inf: sum in float32.
    return torch.linalg.vector_norm(tensor, dtype=torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Full rows: `values[i]` are STATISTIC_COLUMNS and `counts[i]` COUNT_COLUMNS of tensor i."""

    values: Floats
    counts: Counts

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Which tensors have a NaN or an infinity."""
        bad: npt.NDArray[np.bool_] = (self.counts[:, 2] + self.counts[:, 3]) > 0
        return bad


class Summary:
    """Full rows of flat tensors on one device, in two steps.

    On a GPU `packed` is queued when the constructor returns, to be copied to the host; `rows` turns
    the copy into statistics. On the CPU the numbers are there at once and `packed` is None; `rows`
    may read the tensors once more, so it must be called before they change.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        self._numel = np.array([tensor.numel() for tensor in tensors], np.uint64)
        self._host: Doubles | None = None
        self.packed: torch.Tensor | None = None
        if self._on_cpu:
            self._read()
        else:
            self._queue()

    def _read(self) -> None:
        """On the CPU: a Python number costs less than a tensor of one element to be packed."""
        cells: list[float] = []
        nonzero: list[float] = []
        owner: list[int] = []
        scratch = torch.empty(CHUNK, dtype=torch.float32)
        reduce_sum, norm, count = torch.sum, torch.linalg.vector_norm, torch.count_nonzero
        for i, tensor in enumerate(self._tensors):
            n = tensor.numel()
            if n == 0:
                continue
            for chunk in tensor.split(CHUNK) if n > CHUNK else (tensor,):
                x = chunk if chunk.dtype in _WIDE else chunk.float()
                low, high = torch.aminmax(x)
                if x.dtype is torch.float32:
                    l1 = reduce_sum(torch.abs(x, out=scratch[: x.numel()]))
                else:
                    l1 = norm(x, 1)
                cells += (
                    reduce_sum(x).item(),
                    norm(x).item(),
                    l1.item(),
                    low.item(),
                    high.item(),
                )
                nonzero.append(count(x).item())
                owner.append(i)
        self._owner = np.array(owner, np.int64)
        self._host = np.array(cells + nonzero, np.float64)

    def _queue(self) -> None:
        """On a GPU: everything in one tensor, so that it is asked once."""
        cells: list[torch.Tensor] = []
        nonzero: list[torch.Tensor] = []
        direct: list[torch.Tensor] = []
        owner: list[int] = []
        for i, tensor in enumerate(self._tensors):
            if tensor.numel() == 0:
                continue
            x = tensor if tensor.dtype in _WIDE else tensor.float()
            low, high = torch.aminmax(x)
            cells += (x.sum(), torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 1))
            cells += (low, high)
            nonzero.append(torch.count_nonzero(x))
            # The tensors will have changed by the time the copy is there: no second look.
            direct.append(torch.std(x, correction=0))
            owner.append(i)
        self._owner = np.array(owner, np.int64)
        self._tensors = ()
        if cells:
            # float64 holds counts of up to 2**53.
            self.packed = torch.stack([cell.double() for cell in cells + nonzero + direct])

    def rows(self, copied: Doubles | None = None) -> Rows:
        """The statistics; on a GPU from a copy of `packed` on the host."""
        packed = np.zeros(0) if copied is None else copied
        if self._host is not None:
            packed = self._host
        n = len(self._numel)
        values = np.zeros((n, len(STATISTIC_COLUMNS)), np.float64)
        counts = np.zeros((n, len(COUNT_COLUMNS)), np.uint64)
        counts[:, 0] = self._numel
        owner = self._owner
        if len(owner) == 0:
            return Rows(values.astype(np.float32), counts)
        cells = packed[: _PARTS * len(owner)].reshape(-1, _PARTS)
        nonzero = packed[_PARTS * len(owner) : (_PARTS + 1) * len(owner)]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        at = owner[first]
        with np.errstate(all="ignore"):
            total = np.add.reduceat(cells[:, 0], first)
            squares = np.add.reduceat(cells[:, 1] ** 2, first)
            l1 = np.add.reduceat(cells[:, 2], first)
            low = np.minimum.reduceat(cells[:, 3], first)
            high = np.maximum.reduceat(cells[:, 4], first)
            filled = np.add.reduceat(nonzero, first)
            size = self._numel[at].astype(np.float64)
            mean = total / size
            mean_square = squares / size
            variance = mean_square - mean**2
            odd = ~(np.isfinite(total) & np.isfinite(squares) & np.isfinite(l1))
            cancelled = ~odd & (variance < CANCELLATION * mean_square)
            std = np.sqrt(np.maximum(variance, 0))
        values[at] = np.column_stack(
            (low, high, mean, std, l1, np.sqrt(squares), np.maximum(np.abs(low), np.abs(high)))
        )
        counts[at, 1] = (size - filled).astype(np.uint64)
        if self._on_cpu:
            for i in at[cancelled]:
                values[i, 3] = float(_direct_std(self._tensors[i]))
            for i in at[odd]:
                values[i], counts[i] = exact_row(self._tensors[i])
        else:
            values[at, 3] = packed[(_PARTS + 1) * len(owner) :]
            _bounds(values, counts, at[odd])
        return Rows(_to_float32(values), counts)


def rows_of_norms(norm: Floats | Doubles, numel: Sequence[int]) -> tuple[Floats, Counts]:
    """What is known of tensors that are gone when their norms arrive from the GPU.

    Columns `l2`, and `numel nans infs`; the counts of NaN and infinities are lower bounds: 1 where
    there is at least one.
    """
    counts = np.zeros((len(norm), 3), np.uint64)
    counts[:, 0] = numel
    counts[:, 1] = np.isnan(norm)
    counts[:, 2] = np.isinf(norm)
    return np.where(np.isfinite(norm), norm, 0).astype(np.float32).reshape(-1, 1), counts


def exact_row(tensor: torch.Tensor) -> tuple[Doubles, Counts]:
    """One row in float64, over the finite values, with exact counts. Slow (5 ns per element)."""
    exact = ExactRow()
    for chunk in tensor.detach().split(CHUNK_EXACT):
        exact.add(chunk.double().cpu().numpy())
    return exact.row()


def _direct_std(tensor: torch.Tensor) -> torch.Tensor:
    x = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return torch.std(x, correction=0).double()


def _bounds(values: Doubles, counts: Counts, odd: npt.NDArray[np.int64]) -> None:
    """Rows with NaN or infinities whose tensors are gone: counts are lower bounds."""
    for i in odd:
        row = values[i]
        is_nan = bool(np.isnan(row[0]) or np.isnan(row[1]))
        is_inf = bool(np.isinf(row[0]) or np.isinf(row[1]))
        counts[i, 2], counts[i, 3] = int(is_nan), int(is_inf)
        values[i] = np.where(np.isfinite(row), row, 0)


def _to_float32(values: Doubles) -> Floats:
    limit = float(np.finfo(np.float32).max)
    return np.clip(values, -limit, limit).astype(np.float32)
