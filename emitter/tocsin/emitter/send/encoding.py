"""From what waits in the outbox to numbered records of the bus, on the sender's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

from tocsin.bus.port import Outgoing, Partition
from tocsin.emitter.send.outbox import Item, QueuedEvent, StepRow, pack
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import Frame, RecordOrigin, StepFrame, TensorFrame
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where records go, and their origin. `source` is the CloudEvents source."""

    topics: Topics
    origin: RecordOrigin
    source: str
    create_topics: bool = False


class Encoder:
    """Numbers records as it makes them: from 0, and without the numbers of what was dropped."""

    def __init__(self, address: Address, failed: Callable[[str, Exception], None]) -> None:
        """`failed` is called with the kind of each record that could not be made, and why."""
        self.boot: Final = new_id()
        self.refused = 0
        """Items of which no record could be made."""
        self._address = address
        self._failed = failed
        self._seq = 0
        self._left_out = 0

    def encode(self, items: Sequence[Item], *, dropped: int) -> list[Outgoing]:
        """The records of these items; `dropped` were so far, before they came to be encoded."""
        self._seq += dropped - self._left_out
        self._left_out = dropped
        records: list[Outgoing] = []
        for what, group in _groups(items):
            try:
                for value in self._values(group):
                    records.append(self._record(value))
            # Isolated: one record that cannot be made must not end the sending of all others.
            except Exception as error:
                self.refused += len(group)
                self._seq += len(group)
                self._failed(what, error)
        return records

    def _values(self, group: Sequence[Item]) -> Sequence[Frame | Event[Data]]:
        first = group[0]
        if isinstance(first, StepRow):
            return [self._steps(group)]
        if isinstance(first, QueuedEvent):
            event = Event.wrap(
                first.data,
                id=f"{self.boot}/{self._seq}",
                source=self._address.source,
                time_ms=first.time_ms,
            )
            return [event]
        return first.split() if isinstance(first, TensorFrame) else [first]

    def _steps(self, group: Sequence[Item]) -> StepFrame:
        return pack([item for item in group if isinstance(item, StepRow)], self._address.origin)

    def _record(self, value: Frame | Event[Data]) -> Outgoing:
        origin = self._address.origin
        meta = meta_of(value, rank=origin.rank, boot=self.boot, seq=self._seq)
        partition = Partition(self._address.topics.telemetry, telemetry_partition(origin.run_id))
        record = Outgoing(partition, origin.run_id.encode(), value.encode(), meta.headers())
        self._seq += 1
        return record


def _groups(items: Sequence[Item]) -> Iterator[tuple[str, list[Item]]]:
    """What becomes one frame, with the name of its kind: neighbouring rows of the same columns and
    mode, any other item by itself.

    Rows between two other items are put in the order of their steps, since rules take a series as
    it arrives and leave out a step below the last one.
    """
    rows: list[StepRow] = []
    for item in items:
        if isinstance(item, StepRow):
            rows.append(item)
            continue
        yield from _runs(rows)
        rows.clear()
        if isinstance(item, QueuedEvent):
            yield item.data.event_type, [item]
        else:
            yield item.collection if isinstance(item, TensorFrame) else item.type, [item]
    yield from _runs(rows)


def _runs(rows: Iterable[StepRow]) -> Iterator[tuple[str, list[Item]]]:
    """Rows in the order of their steps, those of the same columns and mode together."""
    joined = _joined(sorted(rows, key=attrgetter("step")))
    for _, same in groupby(joined, key=attrgetter("columns", "mode")):
        yield "steps", list(same)


def _joined(rows: Iterable[StepRow]) -> Iterator[StepRow]:
    """Neighbouring rows of one step and mode as one row, where they share no column: a user's own
    scalars stand between the rows of the steps, and would cut each frame down to one row.
    """
    last: StepRow | None = None
    for row in rows:
        if last is None:
            last = row
        elif (row.step, row.mode) == (last.step, last.mode) and set(last.columns).isdisjoint(
            row.columns
        ):
            last = StepRow(
                row.step,
                max(last.at_us, row.at_us),
                last.columns + row.columns,
                last.values + row.values,
                row.mode,
            )
        else:
            yield last
            last = row
    if last is not None:
        yield last
