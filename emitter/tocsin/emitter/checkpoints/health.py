"""What the numbers of a checkpoint are like: finite, all zero, all there.

Bytes and time are bounded. Of a checkpoint that is larger the beginning of each tensor is read, and
the result is marked as incomplete: a NaN in the weights is in all of them soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tocsin.emitter.checkpoints.files import Block, Torn, blocks

MAX_BYTES: Final = 4 * 2**30
"""Bytes of a checkpoint that are read at most."""

MAX_S: Final = 60.0
"""How long it is read at most, seconds."""

NAMES: Final = 64
"""Names of tensors in one report, at most."""

_CHUNK: Final = 8 * 2**20
_MIN_BYTES: Final = 64 * 2**10
_NAME: Final = 200
_CALLBACKS: Final = "callbacks."
"""What Lightning keeps of its callbacks: a best score is infinite until there is one."""


@dataclass(slots=True)
class Health:
    """What was found. `torn` is what is missing of the files; of one that changed meanwhile
    nothing is known (`changed`).

    `tensors` counts those of floating point; `nonfinite` and `zeros` are names, the first `NAMES`.
    Only matrices and larger ones count as zero: biases and step counts may be.
    """

    tensors: int = 0
    matrices: int = 0
    bytes_read: int = 0
    complete: bool = True
    changed: bool = False
    torn: str = ""
    nonfinite: list[str] = field(default_factory=list)
    nonfinite_tensors: int = 0
    zeros: list[str] = field(default_factory=list)
    zero_tensors: int = 0

    def as_dict(self) -> dict[str, object]:
        """Its fields, for JSON."""
        return asdict(self)


def health(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_s: float = MAX_S,
    clock: Callable[[], float] = time.monotonic,
) -> Health:
    """Read a checkpoint, a file or a folder. Raises OSError: it cannot be read.

    Blocks for `max_s` and one tensor more at most, by `clock`, if the file system does not hang.
    """
    until = clock() + max_s
    before = _stamp(path)
    found = Health()
    listed: list[Block] = []
    try:
        for block in blocks(path):
            listed.append(block)
            if clock() > until:
                found.complete = False
                break
    except Torn as error:
        found.torn = str(error)[:500]
    found.tensors = len(listed)
    found.matrices = sum(_is_matrix(block) for block in listed)
    total = sum(block.bytes for block in listed)
    share = 1.0 if total <= max_bytes else max_bytes / total
    for block in listed:
        if clock() > until:
            found.complete = False
            break
        length = block.bytes if share >= 1 else max(_MIN_BYTES, int(block.bytes * share) & ~7)
        _inspect(block, min(length, block.bytes), found)
    found.changed = _stamp(path) != before
    return found


def _inspect(block: Block, length: int, found: Health) -> None:
    whole = length == block.bytes
    found.complete &= whole
    zero, bad, mask = True, False, True
    with block.path.open("rb") as file:
        file.seek(block.offset)
        left = length
        while left > 0:
            raw = file.read(min(_CHUNK, left))
            if not raw:
                found.torn = found.torn or f"{block.path.name} is cut off in {block.name}"[:500]
                return
            left -= len(raw)
            found.bytes_read += len(raw)
            zero = zero and not np.frombuffer(raw, np.uint8).any()
            if zero:
                continue
            if not block.shape:
                # A single number is no mask, but a best one so far begins at either infinity.
                raw = raw[:-1] + bytes([raw[-1] | 0x80])
            nan_or_inf, only_mask = _anomalies(raw, block.dtype)
            bad |= nan_or_inf
            mask &= only_mask
    name = block.name[:_NAME]
    if bad and not mask and not block.name.startswith(_CALLBACKS):
        found.nonfinite_tensors += 1
        if len(found.nonfinite) < NAMES:
            found.nonfinite.append(name)
    if zero and whole and _is_matrix(block):
        found.zero_tensors += 1
        if len(found.zeros) < NAMES:
            found.zeros.append(name)


def _anomalies(raw: bytes, dtype: str) -> tuple[bool, bool]:
    """Whether some numbers are not finite; and whether all are 0 or -Inf, as in a mask."""
    if dtype == "float8_e4m3fn":
        bits = np.frombuffer(raw, np.uint8)
        return bool(((bits & 0x7F) == 0x7F).any()), False
    if dtype == "float8_e5m2":
        bits = np.frombuffer(raw, np.uint8)
        bad, low = (bits & 0x7C) == 0x7C, bits == 0xFC
        zero = (bits & 0x7F) == 0
        return bool(bad.any()), bool((low | zero).all())
    if dtype == "bfloat16":
        words = np.frombuffer(raw[: len(raw) & ~1], "<u2")
        bad, low = (words & 0x7F80) == 0x7F80, words == 0xFF80
        zero = (words & 0x7FFF) == 0
        return bool(bad.any()), bool((low | zero).all())
    kind = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}[dtype]
    size = int(kind[-1])
    values = np.frombuffer(raw[: len(raw) - len(raw) % size], kind)
    if np.isfinite(values).all():
        return False, bool((values == 0).all())
    return True, bool((np.isneginf(values) | (values == 0)).all())


def _is_matrix(block: Block) -> bool:
    return len(block.shape) >= 2


def _stamp(path: Path) -> tuple[tuple[int, int, int], ...]:
    """What changes when a file is written anew; of a folder, its files'."""
    files = [path] if not path.is_dir() else sorted(path.rglob("*"))[:1000]
    stamps = []
    for file in files:
        stat = file.stat()
        stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)
