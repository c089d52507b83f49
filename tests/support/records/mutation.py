"""Bytes with a few things wrong, at random, as a bad cable or somebody who tries makes them."""

from __future__ import annotations

import random

WORDS = (b"NaN", b"1e999", b"-", b"9" * 30, b'"', b"[" * 40, b"{", b"\xff", b"null", b"\x00" * 8)


def bent(data: bytes, dice: random.Random) -> bytes:
    """With one to three changes."""
    value = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randint(0, len(value))
        match dice.randrange(6):
            case 0 if at < len(value):
                value[at] = dice.randrange(256)
            case 1:
                del value[at:]
            case 2:
                del value[at : at + dice.randint(1, 16)]
            case 3:
                value[at:at] = dice.choice(WORDS)
            case 4 if at < len(value):
                # A digit for a digit: well formed, and another number.
                if chr(value[at]).isdigit():
                    value[at] = ord(dice.choice("0123456789"))
            case _:
                value += value[at : at + 64]
    return bytes(value)
