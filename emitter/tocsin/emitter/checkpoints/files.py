"""Where the tensors of a checkpoint are in its files: torch, safetensors, DCP.

Nothing is unpickled. What is wrong with a file's build (cut off, a part missing) is a `Torn`; a
file of another kind has no tensors here, and nothing is reported about it.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tocsin.emitter.checkpoints.pickles import (
    MAX_BYTES,
    BadPickle,
    Tensor,
    UnknownObject,
    structure,
    tensors,
)

MAX_FILES: Final = 1000
"""Files of a folder that are looked at."""

SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".safetensors"})
"""How files are called whose being empty or cut off is visible in their first bytes."""

_ZIP: Final = b"PK\x03\x04"
_MAX_HEADER: Final = 100 * 2**20
_DCP: Final = ".metadata"

_ITEM: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e5m2Storage": "float8_e5m2",
}
_SAFETENSORS: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


class Torn(ValueError):
    """A file is not whole."""


@dataclass(frozen=True, slots=True)
class Block:
    """The numbers of a tensor: `bytes` of a file from `offset` on, of that type, with its shape."""

    name: str
    path: Path
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


def blocks(path: Path) -> Iterator[Block]:
    """The tensors of floating point in a checkpoint, a file or a folder, file by file.

    Raises:
        Torn: it is not whole; what was given before is in it.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        yield from _file(path)
        return
    metadata = path / _DCP
    files = _files(path)
    if metadata.is_file():
        yield from _dcp(path, metadata)
        files = [file for file in files if file.suffix != ".distcp"]
    elif any(file.suffix == ".distcp" for file in files):
        raise Torn(f"{path.name} has parts, but no {_DCP}: it was not finished")
    for file in files:
        yield from _file(file)


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for where, _, names in os.walk(folder):
        found += [Path(where, name) for name in sorted(names)]
        if len(found) > MAX_FILES:
            break
    return sorted(found[:MAX_FILES])


def _file(path: Path) -> Iterator[Block]:
    size = path.stat().st_size
    known = path.suffix in SUFFIXES
    if size == 0:
        if known:
            raise Torn(f"{path.name} is empty")
        return
    with path.open("rb") as file:
        first = file.read(4)
        if first == _ZIP:
            yield from _torch(path, file, 0, size, "")
        elif path.suffix == ".safetensors":
            yield from _safetensors(path, file, size)


def _torch(path: Path, file: BinaryIO, start: int, size: int, prefix: str) -> Iterator[Block]:
    """What `torch.save` has written there."""
    part = _Part(file, start, size)
    try:
        archive = zipfile.ZipFile(part)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Torn(f"{path.name} is cut off: it has no list of its parts") from error
    with archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        main = next((name for name in entries if name.endswith("/data.pkl")), None)
        if main is None or entries[main].file_size > MAX_BYTES:
            return
        folder = main.removesuffix("data.pkl")
        try:
            with archive.open(main) as pickled:
                found = structure(io.BytesIO(pickled.read()))
        except (BadPickle, zipfile.BadZipFile, EOFError) as error:
            raise Torn(f"{path.name}: its list of tensors cannot be read ({error})") from error
        seen: set[tuple[str, int, int]] = set()
        for name, tensor in tensors(found):
            dtype, storage = _dtype(tensor), tensor.storage
            if dtype is None or not tensor.numel:
                continue
            item = _ITEM[dtype]
            entry = entries.get(f"{folder}data/{storage.key}")
            if entry is None:
                raise Torn(f"{path.name} has no numbers of {name or 'a tensor'}")
            if entry.compress_type != zipfile.ZIP_STORED:
                continue
            begin, count = _range(tensor, entry.file_size // item)
            # Tied weights have the same numbers, and many views have one storage.
            if not count or (storage.key, begin, count) in seen:
                continue
            seen.add((storage.key, begin, count))
            if (begin + count) * item > entry.file_size:
                raise Torn(f"{path.name} has too few numbers of {name or 'a tensor'}")
            offset = start + _data_offset(part, entry) + begin * item
            if offset + count * item > start + size:
                raise Torn(f"{path.name} is cut off in {name or 'a tensor'}")
            yield Block(prefix or name, path, offset, count * item, dtype, tensor.shape)


def _range(tensor: Tensor, stored: int) -> tuple[int, int]:
    """Where its numbers begin in its storage of `stored` numbers, and how many they are.

    No numbers: they stand apart, and what stands between them is of no tensor, maybe. One that was
    expanded repeats its numbers.
    """
    if tensor.in_a_row:
        return tensor.offset, tensor.numel
    return (0, stored) if tensor.offset == 0 and stored <= tensor.numel else (0, 0)


def _dtype(tensor: Tensor) -> str | None:
    if tensor.kind:
        name = tensor.kind.removeprefix("torch.")
        return name if name in _ITEM else None
    return _STORAGES.get(tensor.storage.kind.rpartition(".")[2])


def _data_offset(part: _Part, entry: zipfile.ZipInfo) -> int:
    """Where the bytes of an entry begin: behind its header, whose length stands in it."""
    part.seek(entry.header_offset)
    header = part.read(30)
    if len(header) < 30 or header[:4] != _ZIP:
        raise Torn(f"the header of {entry.filename} is damaged")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return entry.header_offset + 30 + name + extra


def _safetensors(path: Path, file: BinaryIO, size: int) -> Iterator[Block]:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > _MAX_HEADER or 8 + length > size:
        raise Torn(f"{path.name} is cut off in its header")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise Torn(f"{path.name}: its header is not JSON") from error
    if not isinstance(header, dict):
        raise Torn(f"{path.name}: its header is not a mapping")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = (int(each) for each in entry["data_offsets"])
            shape = tuple(int(each) for each in entry["shape"])
            dtype = _SAFETENSORS.get(entry["dtype"])
        except (TypeError, ValueError, KeyError) as error:
            raise Torn(f"{path.name}: its header does not describe {name!r}") from error
        if not 0 <= begin <= end or 8 + length + end > size:
            raise Torn(f"{path.name} is cut off in {name}")
        if dtype is None or not math.prod(shape):
            continue
        if end - begin != math.prod(shape) * _ITEM[dtype]:
            raise Torn(f"{path.name} has too few numbers of {name}")
        yield Block(name, path, 8 + length + begin, end - begin, dtype, shape)


def _dcp(folder: Path, metadata: Path) -> Iterator[Block]:
    """What `torch.distributed.checkpoint` has written: items in files, listed in one pickle."""
    if metadata.stat().st_size > MAX_BYTES:
        return
    with metadata.open("rb") as file:
        try:
            found = structure(file)
        except BadPickle as error:
            raise Torn(f"{folder.name}: its {_DCP} cannot be read ({error})") from error
    listed = found.fields.get("storage_data") if isinstance(found, UnknownObject) else None
    for index, info in (listed if isinstance(listed, dict) else {}).items():
        if not (isinstance(index, UnknownObject) and isinstance(info, UnknownObject)):
            continue
        name, place = index.fields.get("fqn"), info.fields
        file_name, offset, length = (place.get(k) for k in ("relative_path", "offset", "length"))
        if not (isinstance(file_name, str) and isinstance(offset, int) and isinstance(length, int)):
            continue
        if place.get("transform_descriptors") or os.path.isabs(file_name) or ".." in file_name:
            continue
        path = folder / file_name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise Torn(f"{folder.name} has no {file_name}, which holds {name}") from None
        if offset + length > size:
            raise Torn(f"{folder.name}/{file_name} is cut off in {name}")
        with path.open("rb") as file:
            file.seek(offset)
            if file.read(4) == _ZIP:
                yield from _torch(path, file, offset, length, str(name))


class _Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = (0, self._at, self._size)[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        found = self._file.read(wanted)
        self._at += len(found)
        return found
