"""Records that are no telemetry, made of one that is."""

from __future__ import annotations

import json
import random

from tocsin.bus.port import Record


def poisons(good: Record) -> list[tuple[bytes, bytes | None, tuple[tuple[str, bytes], ...]]]:
    """Twenty kinds of what is no telemetry: key, value, headers."""
    value, headers = good.value or b"", dict(good.headers)
    dice = random.Random(20261125)

    def but(**more: bytes) -> tuple[tuple[str, bytes], ...]:
        changed = headers | {f"tocsin-{name}": data for name, data in more.items()}
        return tuple(changed.items())

    def event(**more: object) -> bytes:
        return json.dumps({**json.loads(value), **more}).encode()

    same = good.headers
    data = json.loads(value)["data"]
    return [
        (good.key, b"", same),
        (good.key, b"\x00", same),
        (good.key, b"not json", same),
        (good.key, b"null", same),
        (good.key, b"[]", same),
        (good.key, b"{}", same),
        (good.key, value[:-1], same),
        (good.key, value[len(value) // 2 :], same),
        (good.key, dice.randbytes(1_000), same),
        (good.key, b"[" * 100_000, same),
        (good.key, event(specversion="9.9"), same),
        (good.key, event(data="text"), same),
        (good.key, event(data={**data, "run_id": "another"}), same),
        (good.key, event(data={**data, "rank": -1}), same),
        (good.key, event(data={**data, "rank": 10**9}), same),
        (good.key, event(data={**data, "world_size": "many"}), same),
        (b"\xff\xfe", value, same),
        (good.key, value, but(type=b"tocsin.no.such")),
        (good.key, value, but(version=b"99")),
        (good.key, value, but(seq=b"-7")),
        (good.key, value, but(type=b"tensors")),
        (good.key, value, ()),
    ]
