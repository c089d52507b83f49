"""The records of a TensorBoard file (length, data, checksums), and protobuf's fields. Pure.

Both are a page of code, and TensorBoard with its protobuf is not: so an export needs neither.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C (Castagnoli), reflected
_MASK_DELTA: Final = 0xA282EAD8


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes."""
    value = 0xFFFFFFFF
    table = _TABLE
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One record of a file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    """A whole number as protobuf writes it; negative ones as 64 bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def whole(number: int, value: int) -> bytes:
    """A field of an integer type."""
    return varint(number << 3) + varint(value)


def double(number: int, value: float) -> bytes:
    """A field of the type double."""
    return varint(number << 3 | 1) + struct.pack("<d", value)


def single(number: int, value: float) -> bytes:
    """A field of the type float; what does not fit is infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return varint(number << 3 | 5) + packed


def data(number: int, value: bytes) -> bytes:
    """A field of the type string or bytes, or a message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def doubles(number: int, values: Iterable[float]) -> bytes:
    """A packed field of doubles."""
    return data(number, b"".join(struct.pack("<d", value) for value in values))
