"""What waits to be sent: bounded by count and by bytes, the least important dropped first.

Pure: no thread, no clock, no bus. Whoever shares it between threads holds a lock around each call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from tocsin.schemas.events import Data
from tocsin.schemas.telemetry import Mode, Speaker, StepFrame, SystemFrame, TensorFrame

MAX_ITEMS: Final = 20_000
MAX_BYTES: Final = 64 * 1024 * 1024

BATCH_ITEMS: Final = 2_000
BATCH_BYTES: Final = 8 * 1024 * 1024


class Worth(IntEnum):
    """How much a record is worth; the lowest is dropped first. Lifecycle never is."""

    TENSORS = 0
    SCALARS = 1
    MARKS = 2
    LIFECYCLE = 3


@dataclass(frozen=True, slots=True)
class StepRow:
    """The scalars of one step, to be packed with their neighbours."""

    step: int
    at_us: int
    columns: tuple[str, ...]
    values: tuple[float, ...]
    mode: Mode = "train"


@dataclass(frozen=True, slots=True)
class Said:
    """An event, and when it was said (Unix, milliseconds)."""

    data: Data
    time_ms: int


Item = StepRow | Said | TensorFrame | SystemFrame


class Outbox:
    """A bounded queue of items."""

    def __init__(self, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: dict[int, tuple[Item, int, Worth]] = {}
        self._order: dict[Worth, deque[int]] = {worth: deque() for worth in Worth}
        self._next = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, worth: Worth, *, replaces: type[Data] | None = None) -> None:
        """Add an item; whatever is over the bounds is dropped, the least worth and oldest first.

        `replaces` takes away an event of that type that still waits: only the newest counts.
        """
        if replaces is not None:
            for number in self._order[worth]:
                old = self._items[number][0]
                if isinstance(old, Said) and isinstance(old.data, replaces):
                    self._remove(number, worth)
                    break
        size = size_of(item)
        self._items[self._next] = (item, size, worth)
        self._order[worth].append(self._next)
        self._next += 1
        self._bytes += size
        while len(self._items) > self._max_items or self._bytes > self._max_bytes:
            victim = next((w for w in Worth if w is not Worth.LIFECYCLE and self._order[w]), None)
            if victim is None:
                return
            self._remove(self._order[victim][0], victim)
            self.dropped += 1

    def take(self, max_items: int = BATCH_ITEMS, max_bytes: int = BATCH_BYTES) -> list[Item]:
        """Remove and return the oldest items, at least one if there is any."""
        taken: list[Item] = []
        size = 0
        for number, (item, more, worth) in list(self._items.items())[:max_items]:
            if taken and size + more > max_bytes:
                break
            taken.append(item)
            size += more
            self._remove(number, worth)
        return taken

    def _remove(self, number: int, worth: Worth) -> None:
        _, size, _ = self._items.pop(number)
        self._bytes -= size
        order = self._order[worth]
        if order[0] == number:
            order.popleft()
        else:
            order.remove(number)


def size_of(item: Item) -> int:
    """About how many bytes an item holds."""
    if isinstance(item, TensorFrame):
        names = sum(map(len, item.rows)) if len(item.rows) < 64 else 48 * len(item.rows)
        return item.values.nbytes + item.counts.nbytes + names + 512
    if isinstance(item, SystemFrame):
        return item.values.nbytes + item.at_us.nbytes + 512
    return 16 * len(item.columns) + 64 if isinstance(item, StepRow) else 1024


def pack(rows: list[StepRow], speaker: Speaker) -> StepFrame:
    """One frame of rows that have the same columns and mode."""
    first = rows[0]
    return StepFrame(
        speaker=speaker,
        steps=np.array([row.step for row in rows], np.uint64),
        at_us=np.array([row.at_us for row in rows], np.uint64),
        columns=first.columns,
        values=np.array([row.values for row in rows], np.float64)
        .astype(np.float32)
        .reshape(len(rows), len(first.columns)),
        mode=first.mode,
    )
