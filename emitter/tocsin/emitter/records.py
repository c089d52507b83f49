"""`run.record`: an array of any framework as a summary of one row."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tocsin.emitter.arrays import row_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.telemetry import COUNT_COLUMNS, STATISTIC_COLUMNS, Speaker, TensorFrame

_NUMPY_FLOATS: Final = (".float16", ".float32", ".float64")


def as_array(array: object) -> npt.NDArray[Any]:
    """A NumPy view or copy of it. What NumPy has no type for (bfloat16) becomes float32.

    Raises:
        ConfigurationError: it is no array of numbers.
    """
    detach = getattr(array, "detach", None)
    try:
        if detach is not None:  # a torch tensor: on a GPU this waits for it
            tensor: Any = detach().cpu()
            known = not tensor.is_floating_point() or str(tensor.dtype).endswith(_NUMPY_FLOATS)
            array = tensor if known else tensor.float()
        if hasattr(array, "__array__") or not hasattr(array, "__dlpack__"):
            found = np.asarray(array)
        else:
            found = np.from_dlpack(array)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ConfigurationError(f"record: expected an array of numbers: {error}") from error
    if not np.issubdtype(found.dtype, np.number) and found.dtype != np.bool_:
        raise ConfigurationError(f"record: expected an array of numbers, found {found.dtype}")
    return found


def frame_of(
    speaker: Speaker, name: str, array: npt.NDArray[Any], collection: str, step: int
) -> TensorFrame:
    """The summary of one array."""
    values, counts = row_of(array)
    return TensorFrame(
        speaker=speaker,
        step=step,
        collection=collection,
        rows=(name,),
        columns=STATISTIC_COLUMNS,
        values=values.astype(np.float32).reshape(1, -1),
        count_columns=COUNT_COLUMNS,
        counts=counts.reshape(1, -1),
        at_us=time.time_ns() // 1000,
    )
