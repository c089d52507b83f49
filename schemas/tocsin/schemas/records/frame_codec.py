"""The frame: how numbers travel.

    u32le header length | JSON header | padding to 8 | block | padding to 8 | block …

The header lists the blocks as `arrays: [{name, dtype, shape}]`; blocks follow in that order, each
8-byte aligned from the start of the value, so they are read without a copy. Values that JSON cannot
carry (NaN, infinities) are just bits here. Lengths and shapes are checked against the bytes that
are there before any memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.fields import Many
from tocsin.schemas.topics import MAX_RECORD_BYTES

Array = npt.NDArray[np.float32] | npt.NDArray[np.float64] | npt.NDArray[np.uint64]

_LENGTH: Final = struct.Struct("<I")
_ALIGNMENT: Final = 8
_DTYPES: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(name) for name in ("<f4", "<f8", "<u8")}


H = TypeVar("H", bound="FrameHeader")


class ArraySpec(BaseModel):
    """One block of a frame."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(max_length=64, examples=["values"])
    dtype: Literal["<f4", "<f8", "<u8"] = Field(
        description="float32, float64 or uint64, little-endian"
    )
    shape: Many[Annotated[int, Field(ge=0, le=MAX_RECORD_BYTES)]] = Field(
        max_length=2, description="at most two dimensions, rows first", examples=[[2000, 7]]
    )


class FrameHeader(BaseModel):
    """The fields of every frame header; each kind of frame adds its own."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    arrays: Many[ArraySpec] = Field(
        default=(),
        max_length=16,
        description="the blocks, in the order in which they follow the header",
    )


def encode_frame(header: FrameHeader, arrays: Mapping[str, Array]) -> bytes:
    """Put header and arrays into one value.

    The header's own `arrays` field is replaced by what is handed in.

    Raises:
        ValueError: an array has a type or number of dimensions that frames do not carry (a bug of
            the caller).
    """
    specs = []
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<").str
        if dtype not in _DTYPES or array.ndim > 2:
            raise ValueError(
                f"array {name!r}: {array.dtype} with {array.ndim} dimensions is not a frame block"
            )
        specs.append(ArraySpec(name=name, dtype=dtype, shape=array.shape))  # type: ignore[arg-type]
    text = header.model_copy(update={"arrays": tuple(specs)}).model_dump_json().encode()
    parts = [_LENGTH.pack(len(text)), text]
    size = _LENGTH.size + len(text)
    for spec, array in zip(specs, arrays.values(), strict=True):
        padding = -size % _ALIGNMENT
        block = np.ascontiguousarray(array, dtype=_DTYPES[spec.dtype]).tobytes()
        parts += [bytes(padding), block]
        size += padding + len(block)
    return b"".join(parts)


def decode_frame(value: bytes, model: type[H]) -> tuple[H, dict[str, Array]]:
    """Take a value apart into its header and read-only views of its arrays.

    Raises:
        MalformedRecord: the bytes are not such a frame; nothing else, whatever the bytes.
    """
    text, start = split_header(value)
    try:
        header = model.model_validate_json(text)
    except ValidationError as error:
        raise MalformedRecord(f"frame header: {describe(error)}") from error
    arrays: dict[str, Array] = {}
    for spec in header.arrays:
        start += -start % _ALIGNMENT
        dtype = _DTYPES[spec.dtype]
        count = prod(spec.shape)
        stop = start + count * dtype.itemsize
        if stop > len(value):
            raise MalformedRecord(
                f"frame array {spec.name!r}: {count} x {spec.dtype} ends at byte {stop:,}, "
                f"the value at {len(value):,}"
            )
        if spec.name in arrays:
            raise MalformedRecord(f"frame array {spec.name!r} is there twice")
        arrays[spec.name] = np.frombuffer(value, dtype, count, start).reshape(spec.shape)
        start = stop
    if start != len(value):
        raise MalformedRecord(f"frame has {len(value) - start:,} bytes after its last array")
    return header, arrays


def split_header(value: bytes) -> tuple[bytes, int]:
    """The bytes of the JSON header, and where what follows it starts.

    Raises:
        MalformedRecord: the value is shorter than its own header.
    """
    if len(value) < _LENGTH.size:
        raise MalformedRecord(f"frame of {len(value)} bytes: shorter than its length field")
    (length,) = _LENGTH.unpack_from(value)
    stop = _LENGTH.size + length
    if stop > len(value):
        raise MalformedRecord(f"frame header of {length:,} bytes in a value of {len(value):,}")
    return value[_LENGTH.size : stop], stop


def describe(error: ValidationError) -> str:
    """The first mistake of a validation, as one line without the input."""
    if error.error_count() > 100:
        # Listing them costs several microseconds and a kilobyte each.
        return f"{error.error_count():,} mistakes"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}" if where else f"{first['msg']}{more}"
