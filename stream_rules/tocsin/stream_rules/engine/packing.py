"""Large states, packed: one of 10,000 ranks would be no record of the bus otherwise."""

from __future__ import annotations

import struct
import zlib
from typing import Final

from tocsin.schemas.errors import MalformedRecord

PACKED_FROM: Final = 256 * 1024
"""Bytes from which on a state is packed; below that it costs more time than it saves room."""

MAX_UNPACKED: Final = 64 * 1024 * 1024
"""Bytes of a state, however well it packs."""

_MARK: Final = struct.pack("<I", 0xFFFF_FFFF)
"""Begins what is packed. It is no length of a state, with which one that is not packed begins: a
release that does not know it refuses it, and starts the rule cold."""


def pack(state: bytes) -> bytes:
    """The state, packed if that is worth it."""
    return state if len(state) < PACKED_FROM else _MARK + zlib.compress(state, 1)


def unpack(payload: bytes) -> bytes:
    """What `pack` was given.

    Raises:
        MalformedRecord: it was damaged, or has more than `MAX_UNPACKED` bytes.
    """
    if not payload.startswith(_MARK):
        return payload
    reader = zlib.decompressobj()
    try:
        state = reader.decompress(payload[len(_MARK) :], MAX_UNPACKED)
    except zlib.error as error:
        raise MalformedRecord(f"packed state of a rule: {error}") from error
    if not reader.eof:
        raise MalformedRecord("packed state of a rule: too large, or cut off")
    return state
