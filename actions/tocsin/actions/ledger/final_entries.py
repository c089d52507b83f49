"""What the ledger keeps of final deliveries, and for how long. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.records.deliveries import DeliveryState

KEEP_FINAL_MS: Final = 90 * 86_400_000
"""After that a final entry is removed from the topic, and from here."""

MAX_FINAL: Final = 100_000
"""Final entries of notices that a worker keeps; beyond that the oldest are removed before, those of
issues that are over."""

MAX_OF_OPEN: Final = 100_000
"""Final entries of notices about issues that are not over, kept beside these: they decide who must
be told how the issue ends."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What is kept of a final delivery."""

    key: str
    run_id: str
    incarnation: str
    state: DeliveryState
    updated_ms: int
    attempts: int
    stop: bool
    redrives: int = 0
    reason: str = ""
    """Of a stop; other deliveries need none, and there are many of them."""

    @property
    def issue_id(self) -> str:
        """The issue that it was about."""
        return self.key.partition("/")[0]


class FinalEntries:
    """The final deliveries of a worker, by id.

    Args:
        is_open: whether somebody is still to be notified of the end of an issue.
    """

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._is_open = is_open
        self._by_id: dict[str, Settled] = {}
        self._oldest: list[tuple[int, str]] = []
        self._of_open: list[tuple[int, str]] = []
        self._stops: list[tuple[int, str]] = []

    def __contains__(self, delivery_id: str) -> bool:
        """Whether a delivery is final, and is remembered."""
        return delivery_id in self._by_id

    def get(self, delivery_id: str) -> Settled | None:
        """What is remembered of a delivery; None: it is not final, or long ago."""
        return self._by_id.get(delivery_id)

    def add(self, delivery_id: str, settled: Settled) -> None:
        """A delivery is final."""
        self._by_id[delivery_id] = settled
        heap = self._stops if settled.stop else self._oldest
        heapq.heappush(heap, (settled.updated_ms, delivery_id))

    def remove(self, delivery_id: str) -> None:
        """It is sent once more, if it was final."""
        self._by_id.pop(delivery_id, None)

    def outdated(self, now_ms: int) -> Iterator[tuple[str, Settled]]:
        """Remove the entries that were kept for long enough, or are too many; the oldest first.
        Stops leave by their age alone.
        """
        old_ms = now_ms - KEEP_FINAL_MS
        for heap in (self._oldest, self._of_open, self._stops):
            while heap and (heap[0][0] <= old_ms or self._is_one_too_many(heap)):
                updated_ms, identity = heapq.heappop(heap)
                settled = self._by_id.get(identity)
                # It may have been sent once more since.
                if settled is None or settled.updated_ms != updated_ms:
                    continue
                spared = heap is self._oldest and updated_ms > old_ms
                if spared and self._is_open(settled.issue_id):
                    heapq.heappush(self._of_open, (updated_ms, identity))
                    continue
                del self._by_id[identity]
                yield identity, settled

    def keep(self, kept: Callable[[Settled], bool]) -> list[Settled]:
        """Drop all others; these are returned."""
        dropped = [one for one in self._by_id.values() if not kept(one)]
        self._by_id = {identity: one for identity, one in self._by_id.items() if kept(one)}
        for heap in (self._oldest, self._of_open, self._stops):
            # Else they would be there twice when the partitions come back.
            heap[:] = [one for one in heap if one[1] in self._by_id]
            heapq.heapify(heap)
        return dropped

    def _is_one_too_many(self, heap: list[tuple[int, str]]) -> bool:
        """Whether the oldest of these is to go before its time."""
        if heap is self._oldest:
            return len(self._by_id) - len(self._of_open) > MAX_FINAL
        if heap is not self._of_open:
            return False
        settled = self._by_id.get(heap[0][1])
        over = settled is None or not self._is_open(settled.issue_id)
        return over or len(heap) > MAX_OF_OPEN
