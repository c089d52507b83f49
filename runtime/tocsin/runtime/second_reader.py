"""Reads input partitions a second time, beside the group's place in them, for what a service has
passed over."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tocsin.bus.port import Bus, From, Partition, Reader, Record
from tocsin.bus.reading import reached


@dataclass(frozen=True, slots=True)
class SecondReading:
    """What a service wants to read a second time.

    Attributes:
        places: the partitions, each with the offset from which it goes on.
        paused: whether what was read is to be worked on before more comes.
        turn: another number than before if reading is to begin anew at these offsets.
    """

    places: Mapping[Partition, int] = field(default_factory=dict)
    paused: bool = False
    turn: int = 0

    def within(self, numbers: Collection[int]) -> SecondReading:
        """The same, of partitions with these numbers alone."""
        places = {p: offset for p, offset in self.places.items() if p.number in numbers}
        return replace(self, places=places)


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """What was read a second time, in order per partition, since that `turn` began. What is before
    `reached`, and was not among the records so far, is not in the log any more."""

    records: Sequence[Record] = ()
    reached: Mapping[Partition, int] = field(default_factory=dict)
    turn: int = 0


class SecondReader:
    """One reader for all partitions; it is opened anew when others are wanted, or another turn."""

    def __init__(self, bus: Bus) -> None:
        self._bus: Final = bus
        self._reader: Reader | None = None
        self._reads: frozenset[Partition] = frozenset()
        self._turn = 0
        self._wanted = SecondReading()
        self._records: list[Record] = []
        self._reached: Mapping[Partition, int] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is to be read a second time."""
        return bool(self._wanted.places)

    @property
    def ready(self) -> bool:
        """Whether `poll` may be called."""
        return self._reader is not None and not self._wanted.paused and not self._records

    @property
    def outdated(self) -> bool:
        """Whether other things are wanted than are read: call `open`, while there is no poll."""
        return self._reads != self._wanted.places.keys() or (
            self.wanted and self._turn != self._wanted.turn
        )

    def want(self, reading: SecondReading) -> None:
        """Read this from the next `open` on."""
        self._wanted = reading

    async def open(self) -> None:
        """Read what is wanted; what was not drained is read again. Raises BusUnavailable."""
        await self.close()
        if self.wanted:
            wanted = self._wanted
            starts = {p: From.offset(offset) for p, offset in wanted.places.items()}
            self._reader = await self._bus.reader(starts)
            self._reads, self._turn = frozenset(starts), wanted.turn

    async def poll(self, *, timeout_s: float, max_records: int) -> Sequence[Record]:
        """As `Reader.poll`; after one that is empty it is known where the log goes on."""
        reader = self._reader
        if reader is None:
            return ()
        records = await reader.poll(timeout_s=timeout_s, max_records=max_records)
        if not records:
            partitions = self._reads
            places = await asyncio.gather(*(reached(reader, one) for one in partitions))
            self._reached = dict(zip(partitions, places, strict=True))
        return records

    def keep(self, records: Sequence[Record]) -> None:
        """Until they are drained."""
        self._records += records

    def drain(self) -> ReadAgain:
        """What came since the last call."""
        again = ReadAgain(self._records, self._reached, self._turn)
        self._records, self._reached = [], {}
        return again

    async def close(self) -> None:
        """Let go of what was read and not drained. May block for some seconds."""
        reader, self._reader = self._reader, None
        self._reads, self._records, self._reached = frozenset(), [], {}
        if reader is not None:
            await reader.close()
