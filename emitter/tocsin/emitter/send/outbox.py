"""What waits to be sent: bounded by count and by bytes, the least important dropped first.

Pure: no thread, no clock, no bus. It belongs to the sender's thread. On an embedded bus, what
was sent then waits in the spool (`tocsin.bus.embedded.spool`) until a process reads the bus.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from tocsin.schemas.records.collections import TIER_1
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import Mode, RecordOrigin, StepFrame, SystemFrame, TensorFrame

MAX_ITEMS: Final = 20_000
MAX_BYTES: Final = 64 * 1024 * 1024

BATCH_ITEMS: Final = 2_000
BATCH_BYTES: Final = 8 * 1024 * 1024


class Priority(IntEnum):
    """The priority of a record: the lowest is dropped first, and its oldest. Lifecycle never is.

    Of urgent records the newest is dropped: the oldest names where it began.
    """

    TIER_2 = 0
    TIER_1 = 1
    SCALARS = 2
    MARKS = 3
    ANOMALY = 4
    LIFECYCLE = 5


class StepRow(NamedTuple):
    """The scalars of one step, to be packed with their neighbours.

    A tuple, since the training's own thread makes one each step: a frozen dataclass costs 1 µs.
    """

    step: int
    at_us: int
    columns: tuple[str, ...]
    values: tuple[float, ...]
    mode: Mode = "train"


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """An event, and when it was reported (Unix, milliseconds)."""

    data: Data
    time_ms: int


Item = StepRow | QueuedEvent | TensorFrame | SystemFrame


def priority_of(collection: str) -> Priority:
    """The priority of the tensor summaries of a collection."""
    return Priority.TIER_1 if collection in TIER_1 else Priority.TIER_2


class Outbox:
    """A bounded queue of items."""

    def __init__(self, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        # Number, item, bytes; in each queue, the numbers ascend.
        self._queues: list[deque[tuple[int, Item, int]]] = [deque() for _ in Priority]
        self._next = 0
        self._count = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._count

    def put(self, item: Item, priority: Priority, *, replaces: type[Data] | None = None) -> None:
        """Add an item; what exceeds the bounds is dropped, lowest priority and oldest first.

        `replaces` takes away an event of that type that still waits: only the newest counts.
        """
        queue = self._queues[priority]
        if replaces is not None:
            for entry in queue:
                old = entry[1]
                if isinstance(old, QueuedEvent) and isinstance(old.data, replaces):
                    queue.remove(entry)
                    self._count -= 1
                    self._bytes -= entry[2]
                    break
        size = size_of(item)
        queue.append((self._next, item, size))
        self._next += 1
        self._count += 1
        self._bytes += size
        while self._bytes > self._max_bytes or self._count > self._max_items:
            victim = next(
                (p for p in Priority if p is not Priority.LIFECYCLE and self._queues[p]), None
            )
            if victim is None:
                return
            full = self._queues[victim]
            self._bytes -= (full.pop() if victim is Priority.ANOMALY else full.popleft())[2]
            self._count -= 1
            self.dropped += 1

    def drain(self, max_items: int = BATCH_ITEMS, max_bytes: int = BATCH_BYTES) -> list[Item]:
        """Remove and return the oldest items, at least one if there is any."""
        taken: list[Item] = []
        size = 0
        while queues := [queue for queue in self._queues if queue]:
            queues.sort(key=lambda queue: queue[0][0])
            oldest = queues[0]
            # Most of what waits is scalars: as many as there are before anything else comes.
            before = queues[1][0][0] if len(queues) > 1 else self._next
            while oldest and oldest[0][0] < before:
                _, item, more = oldest[0]
                if taken and (len(taken) >= max_items or size + more > max_bytes):
                    return taken
                oldest.popleft()
                self._count -= 1
                self._bytes -= more
                size += more
                taken.append(item)
        return taken


def size_of(item: Item) -> int:
    """About how many bytes an item holds."""
    if isinstance(item, StepRow):
        return 16 * len(item.columns) + 64
    if isinstance(item, TensorFrame):
        names = sum(map(len, item.rows)) if len(item.rows) < 64 else 48 * len(item.rows)
        return item.values.nbytes + item.counts.nbytes + names + 512
    if isinstance(item, SystemFrame):
        return item.values.nbytes + item.at_us.nbytes + 512
    return 1024


def pack(rows: list[StepRow], origin: RecordOrigin) -> StepFrame:
    """One frame of rows that have the same columns and mode."""
    first = rows[0]
    values = np.array([row.values for row in rows], np.float64)
    # A loss of 1e300 is infinite in float32; no warning of ours in a user's program.
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return StepFrame(
        origin=origin,
        steps=np.array([row.step for row in rows], np.uint64),
        at_us=np.array([row.at_us for row in rows], np.uint64),
        columns=first.columns,
        values=narrow.reshape(len(rows), len(first.columns)),
        mode=first.mode,
    )
