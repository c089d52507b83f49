"""A rule's memory as bytes: JSON of a dataclass, with NaN and infinities, exact to the last bit."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import to_json

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.frame_codec import describe

S = TypeVar("S")
_DTYPES: Final = ("float64", "float32", "uint64", "uint32", "int64", "bool")


def _write_array(array: npt.NDArray[Any]) -> dict[str, object]:
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"an array of {array.dtype} cannot be part of a rule's state")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def _read_array(raw: object) -> npt.NDArray[Any]:
    if isinstance(raw, np.ndarray):
        return raw
    if not isinstance(raw, dict) or raw.get("dtype") not in _DTYPES:
        raise ValueError("expected an array")
    try:
        flat = np.frombuffer(base64.b64decode(raw["data"], validate=True), raw["dtype"])
        return flat.reshape(raw["shape"]).copy()
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError("expected an array") from error


StateArray = Annotated[npt.NDArray[Any], PlainValidator(_read_array), PlainSerializer(_write_array)]
"""A numpy array in a rule's state."""


_adapters: Final[dict[type[Any], TypeAdapter[Any]]] = {}


def _adapter(model: type[Any]) -> TypeAdapter[Any]:
    if model not in _adapters:
        _adapters[model] = TypeAdapter(model)
    return _adapters[model]


def dump_state(state: object) -> bytes:
    """The bytes of a dataclass.

    Raises:
        ValueError: it holds what cannot be written: an array of another type, an object.
    """
    # Not `dump_json`: it writes NaN as null, unless the configuration of each class says otherwise.
    plain = _adapter(type(state)).dump_python(state, mode="json", by_alias=True)
    return to_json(plain, inf_nan_mode="constants")


def load_state(model: type[S], payload: bytes) -> S:
    """Read a dataclass from the bytes of `dump_state`.

    Raises:
        MalformedRecord: these bytes are no such dataclass.
    """
    try:
        state: S = _adapter(model).validate_json(payload)
        return state
    except (ValidationError, RecursionError) as error:
        why = describe(error) if isinstance(error, ValidationError) else "nested too deeply"
        raise MalformedRecord(f"state of a rule: {why}") from error
