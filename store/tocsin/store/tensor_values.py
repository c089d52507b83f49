"""Tensors that a run has saved in full: found, read, checked against what was recorded of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from tocsin.schemas.configuration.values import BUCKETS
from tocsin.schemas.errors import require_extra
from tocsin.schemas.records.saved_tensors import SavedTensor, TensorsSaved
from tocsin.store.errors import DamagedStore, StoreError
from tocsin.store.storage.opening import open_storage
from tocsin.store.storage.port import Storage

Values = npt.NDArray[np.generic]

_TYPES: Final = {
    name: np.dtype(name)
    for name in (
        *("float64", "float32", "float16", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


def read_tensor(
    record: TensorsSaved, tensor: SavedTensor, storage: Storage | None = None
) -> Values:
    """The numbers of a tensor, in its shape; bfloat16 as float32, float8 as its bytes (uint8).

    Reads the whole file. Blocks.

    Args:
        storage: of the store that the run is read from: the file is looked for there first.

    Raises:
        DamagedStore: the file is gone, or holds other numbers than were saved.
        MissingExtra: the extra `store` is not installed.
    """
    require_extra("store", "reading saved tensors", "safetensors")
    import safetensors

    try:
        parts = safetensors.deserialize(_content(record, storage))  # type: ignore[no-untyped-call]
        found = dict(parts)[tensor.name]
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedStore(f"{record.uri} cannot be read: {error!r}") from error
    data = bytes(found["data"])
    if hashlib.sha256(data).hexdigest() != tensor.sha256:
        raise DamagedStore(
            f"{tensor.name} in {record.uri} is not what the run has saved: its checksum differs"
        )
    return as_array(data, tensor.dtype, tensor.shape)


def as_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Values:
    """Numbers as they lie in the file as an array of their shape. Pure."""
    if dtype == "bfloat16":
        # The upper half of a float32.
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype.startswith("float8"):
        return np.frombuffer(data, np.uint8).reshape(shape)
    if dtype not in _TYPES:
        raise StoreError(f"a tensor of type {dtype!r}: this release does not read it")
    return np.frombuffer(data, _TYPES[dtype].newbyteorder("<")).reshape(shape)


def _content(record: TensorsSaved, storage: Storage | None) -> bytes:
    """The file as it is now. Raises OSError, DamagedStore."""
    if storage is not None:
        try:
            return storage.local(record.path).read_bytes()
        except FileNotFoundError:
            pass
    if record.uri.startswith(BUCKETS) and record.uri.endswith(record.path):
        # What was fetched is gone with the storage.
        bucket = open_storage(record.uri.removesuffix(record.path))
        return bucket.local(record.path).read_bytes()
    parts = urlsplit(record.uri)
    if parts.scheme != "file" or not parts.path.endswith(".safetensors"):
        raise DamagedStore(f"{record.uri} is not a file of saved tensors")
    return Path(unquote(parts.path)).read_bytes()
