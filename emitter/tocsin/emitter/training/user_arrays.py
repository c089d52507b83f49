"""`run.record`: arrays of any framework as rows of a summary.

They are read in pieces of 65,536 numbers. A copy of the whole is made only of an array with gaps
between its numbers, of one that its framework hands out as a copy, of a tensor of a type that NumPy
lacks (bfloat16, float8), and of one on a GPU, which is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tocsin.emitter.statistics.arrays import as_float32, is_numbers, real_numbers, row_of
from tocsin.emitter.statistics.quantiles import ROW_COLUMNS, quantile_rows, sample_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.frames import COUNT_COLUMNS, RecordOrigin, TensorFrame

HELP: Final = (
    "an array of numbers: of NumPy or PyTorch, with `__array__` or DLPack, or a list of numbers"
)


_AS_THEY_ARE: Final = ("torch.bool", "torch.float16")
"""Types that NumPy has, and reads piece by piece."""


class _Capsule:
    """A bare DLPack capsule as what NumPy takes: an object that hands it out, on the CPU."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, *, stream: None = None, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def as_array(array: object) -> npt.NDArray[Any]:
    """A NumPy view or copy of an array of any shape, in that shape.

    Of a PyTorch tensor it is `[n]`, and of a masked array what is not masked, `[n]`.
    What NumPy has no type for (bfloat16) becomes float32. Waits for an array on a GPU.

    Raises:
        ConfigurationError: it is no array of numbers.
    """
    try:
        found = _found(array)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        raise ConfigurationError(
            f"record: expected {HELP}; {type(array).__name__}: {error}"
        ) from error
    if not is_numbers(found.dtype):
        raise ConfigurationError(
            f"record: expected {HELP}; found {type(array).__name__} of {found.dtype}"
        )
    return found


def frame_of(
    origin: RecordOrigin,
    arrays: Mapping[str, npt.NDArray[Any]],
    collection: str,
    step: int,
) -> TensorFrame:
    """The summary of some arrays of any shape, each a row.

    Raises:
        TypeError: the elements of one are no numbers.
    """
    flat = [real_numbers(array) for array in arrays.values()]
    rows = [row_of(numbers) for numbers in flat]
    samples = [sample_of(numbers) for numbers in flat]
    values = as_float32(np.array([row for row, _ in rows]))
    return TensorFrame(
        origin=origin,
        step=step,
        collection=collection,
        rows=tuple(arrays),
        columns=ROW_COLUMNS,
        values=np.hstack((values, quantile_rows(samples))),
        count_columns=COUNT_COLUMNS,
        counts=np.array([counts for _, counts in rows], np.uint64),
        at_us=unix_us(),
    )


def _found(array: object) -> npt.NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _tensor_values(array)
    if type(array).__name__ == "PyCapsule":
        return np.from_dlpack(_Capsule(array))
    if isinstance(array, np.ma.MaskedArray):
        return np.asarray(array.compressed())
    # CuPy refuses `__array__`, which would copy without being asked to.
    get = getattr(array, "get", None)
    if hasattr(array, "__cuda_array_interface__") and callable(get):
        return np.asarray(get())
    if hasattr(array, "__array__") or not hasattr(array, "__dlpack__"):
        return np.asarray(array)
    return np.from_dlpack(array)


def _tensor_values(tensor: Any) -> npt.NDArray[Any]:
    from tocsin.emitter.statistics.cpu_rows import as_numpy
    from tocsin.emitter.statistics.reductions import dense

    flat = dense(tensor)
    if flat is None:
        raise TypeError(f"a tensor of {tensor.dtype} on {tensor.device} has no numbers to read")
    flat = flat.cpu()
    if str(flat.dtype) in _AS_THEY_ARE:
        return np.asarray(flat.numpy())
    return as_numpy(flat)
