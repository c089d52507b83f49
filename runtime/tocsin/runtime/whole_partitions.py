"""Reading partitions whole, without a group: how state comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tocsin.bus.port import EARLIEST, Bus, From, Partition, Record
from tocsin.bus.reading import read_to_end


@dataclass(frozen=True, slots=True)
class Restored:
    """The ends up to which partitions were read, and how many records that took."""

    ends: Mapping[Partition, int]
    read: int


NOTHING: Final[Mapping[Partition, int]] = MappingProxyType({})


async def read_whole(
    bus: Bus,
    partitions: Sequence[Partition],
    sink: Callable[[Sequence[Record]], Awaitable[None]],
    *,
    positions: Mapping[Partition, int] = NOTHING,
) -> Restored:
    """Read from the earliest record, or from a position, up to the end seen at the start.

    A reader of its own, so that an assignment that changes in the middle cannot disturb it. One
    that ends before the position is another log now, and is read from its beginning.

    Raises:
        BusUnavailable, UnknownTopic: as `read_to_end`.
    """
    if not partitions:
        return Restored({}, 0)
    known = {p: positions[p] for p in partitions if p in positions}
    start = {p: From.offset(known[p]) if p in known else EARLIEST for p in partitions}
    reader = await bus.reader(start)
    try:
        ends = await reader.ends(partitions)
        for partition, position in known.items():
            if position > ends[partition]:
                await reader.seek(partition, EARLIEST)
        read = 0
        async for records in read_to_end(reader, ends):
            wanted = [record for record in records if record.offset < ends[record.partition]]
            read += len(wanted)
            if wanted:
                await sink(wanted)
        return Restored(ends, read)
    finally:
        await reader.close()
