"""Reading partitions whole, without a group: how state comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from tocsin.bus.port import EARLIEST, Bus, From, Partition, Record
from tocsin.bus.reading import read_to_end


async def read_whole(
    bus: Bus,
    partitions: Sequence[Partition],
    sink: Callable[[Sequence[Record]], Awaitable[None]],
) -> Mapping[Partition, int]:
    """Read from the earliest record up to the end seen at the start; returns these ends.

    A reader of its own, so that an assignment that changes in the middle cannot disturb it.

    Raises:
        BusUnavailable, UnknownTopic: as `read_to_end`.
    """
    if not partitions:
        return {}
    start: dict[Partition, From] = dict.fromkeys(partitions, EARLIEST)
    reader = await bus.reader(start)
    try:
        ends = await reader.ends(partitions)
        async for records in read_to_end(reader, ends):
            wanted = [record for record in records if record.offset < ends[record.partition]]
            if wanted:
                await sink(wanted)
        return ends
    finally:
        await reader.close()
