"""Reading what is there, and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from tocsin.bus.port import BusUnavailable, FencedMember, Partition, Reader, Record

QUIET_S: Final = 10.0
"""How long to wait for the next record that is there by the bus's own account."""

_POLL_S: Final = 1.0


async def read_to_end(
    reader: Reader,
    ends: Mapping[Partition, int],
    *,
    max_records: int = 1_000,
    quiet_s: float = QUIET_S,
) -> AsyncIterator[Sequence[Record]]:
    """What `reader` polls until it has reached each of `ends`, which it was asked for.

    Records that were appended meanwhile may be among it, behind these ends: they are read as well.

    Raises:
        BusUnavailable: the bus does not answer, or nothing came for `quiet_s`.
        UnknownTopic, BusClosed: as `poll` does.
    """
    heard_s = time.monotonic()
    while await _behind(reader, ends):
        records = await reader.poll(timeout_s=min(_POLL_S, quiet_s), max_records=max_records)
        if records:
            yield records
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s >= quiet_s:
            raise BusUnavailable(
                f"no records came for {quiet_s:g} s, though the bus says there are more"
            )


async def reached(reader: Reader, partition: Partition) -> int:
    """Where the next poll goes on in a partition: past what retention has removed, which no record
    shows. 0 where the reader does not know. Blocks for a second at most.
    """
    try:
        async with asyncio.timeout(_POLL_S):
            return await reader.position(partition)
    except (BusUnavailable, FencedMember, TimeoutError, ValueError):
        # It is being looked for, or the partition is about to go.
        return 0


async def _behind(reader: Reader, ends: Mapping[Partition, int]) -> bool:
    for partition, end in ends.items():
        if await reader.position(partition) < end:
            return True
    return False
