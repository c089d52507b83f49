"""Reading partitions whole, without a group: how state comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from tocsin.bus.port import EARLIEST, Bus, From, Partition, Record

_POLL_S: Final = 1.0
_MAX_RECORDS: Final = 1_000


async def read_whole(
    bus: Bus,
    partitions: Sequence[Partition],
    sink: Callable[[Sequence[Record]], Awaitable[None]],
) -> Mapping[Partition, int]:
    """Read from the earliest record up to the end seen at the start; returns these ends.

    A reader of its own, so that an assignment that changes in the middle cannot disturb it.

    Raises:
        BusUnavailable, UnknownTopic.
    """
    if not partitions:
        return {}
    start: dict[Partition, From] = dict.fromkeys(partitions, EARLIEST)
    reader = await bus.reader(start)
    try:
        ends = await reader.ends(partitions)
        left = [p for p in partitions if await reader.position(p) < ends[p]]
        while left:
            records = await reader.poll(timeout_s=_POLL_S, max_records=_MAX_RECORDS)
            wanted = [record for record in records if record.offset < ends[record.partition]]
            if wanted:
                await sink(wanted)
            left = [p for p in left if await reader.position(p) < ends[p]]
        return ends
    finally:
        await reader.close()
