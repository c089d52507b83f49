"""Tensors in, rows of statistics out.

Two depths: `norms` (one reduction per tensor) and `Summary` (a full row per tensor). On a GPU both
put all their results into one tensor, which is asked once and never waited for; on the CPU the
values are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tocsin.emitter.statistics.arrays import Doubles, Rows, narrowed
from tocsin.emitter.statistics.cpu_rows import exact_row, host_rows
from tocsin.emitter.statistics.gpu_rows import PackedRows
from tocsin.emitter.statistics.readable import NUMBERS, types
from tocsin.schemas.records.frames import Counts, Floats

__all__ = ["Rows", "Summary", "dense", "exact_row", "norms", "rows_of_norms"]


_ELEMENTS: Final = NUMBERS | types(
    *("complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""Types with one number in each element; packed ones (float4, bits) have none to read."""

_PART: Final = 1 << 18

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor of any shape: `[n]`, real, without a graph; None if it has none.

    A DTensor gives its local part, a sparse tensor the values it stores, a complex one its real and
    imaginary parts side by side. Tensors on `meta`, quantised ones, lazy ones before their first
    call and those of other libraries have no values. Copies only if the layout requires it.
    """
    if (
        type(tensor) in _PLAIN
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_meta or tensor.is_nested or tensor.is_neg())
    ):
        return tensor.detach().view(-1)
    if is_lazy(tensor):
        return None
    local = getattr(tensor, "to_local", None)
    if local is not None:
        tensor = local()
    tensor = tensor.detach()
    if tensor.is_meta or tensor.is_quantized or tensor.dtype not in _ELEMENTS:
        return None
    if tensor.layout is torch.jagged or tensor.is_nested or is_traceable_wrapper_subclass(tensor):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Channels last, transposed, …: without gaps in memory it is contiguous in another order.
    stride = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -stride[d]))
    return ordered.view(-1) if ordered.is_contiguous() else tensor.reshape(-1)


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norms of tensors `[n]` on one device: `[len(tensors)]`, float32, on that device.

    The norm of a tensor with a NaN or an infinity is not finite.
    """
    if tensors[0].is_cuda and all(tensor.dtype is torch.float32 for tensor in tensors):
        # There one call is a few launches for all of them; on a CPU it saves nothing.
        return torch.stack(torch._foreach_norm(list(tensors)))
    return torch.stack([_norm(tensor) for tensor in tensors])


def lengths(vectors: torch.Tensor) -> torch.Tensor:
    """The L2 norms of vectors `[..., width]`: `[...]`, float32, summed in at least float32."""
    wide = torch.float64 if vectors.dtype is torch.float64 else torch.float32
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).float()


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu and tensor.numel() > _PART:
        # In one go the float32 norm of 1e8 numbers is 1 % too small there.
        parts = torch.stack([_norm(part) for part in tensor.split(_PART)])
        return torch.linalg.vector_norm(parts.double()).float()
    if tensor.dtype is torch.float32:
        return torch.linalg.vector_norm(tensor)
    if tensor.dtype is torch.float64:
        return torch.linalg.vector_norm(tensor).float()
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        tensor = tensor.float()  # float8 has no reductions
    # A float16 norm of 1e6 values near 300 is inf: sum in float32.
    return torch.linalg.vector_norm(tensor, dtype=torch.float32)


class Summary:
    """Full rows of tensors on one device, each `[n]`, in two steps.

    On a GPU `packed` is queued when the constructor returns, to be copied to the host; `rows` turns
    the copy into statistics. On the CPU the numbers are there at once and `packed` is None.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._packed: PackedRows | None = None
        self._rows: Rows | None = None
        if all(tensor.is_cpu for tensor in tensors):
            self._rows = host_rows(tensors)
        else:
            self._packed = PackedRows(tensors)

    @property
    def packed(self) -> torch.Tensor | None:
        """What is to be copied, `[m]`, float64, on their device; None: nothing."""
        return None if self._packed is None else self._packed.packed

    def rows(self, copied: Doubles | None = None) -> Rows:
        """The statistics; on a GPU from a copy of `packed` on the host, `[m]`."""
        if self._rows is not None:
            return self._rows
        assert self._packed is not None
        return self._packed.rows(np.zeros(0) if copied is None else copied)


def rows_of_norms(norm: Floats | Doubles, numel: Sequence[int]) -> tuple[Floats, Counts]:
    """What is known of T tensors that are gone when their norms, `[T]`, arrive from the GPU.

    Columns `l2`, `[T, 1]`, and `numel nans infs`, `[T, 3]`; the counts of NaN and infinities are
    lower bounds: 1 where there is at least one.
    """
    counts = np.zeros((len(norm), 3), np.uint64)
    counts[:, 0] = numel
    counts[:, 1] = np.isnan(norm)
    counts[:, 2] = np.isinf(norm)
    return narrowed(np.where(np.isfinite(norm), norm, 0)).reshape(-1, 1), counts
