"""Which pending deliveries have something in common, such as issue and receiver. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

from tocsin.schemas.records.deliveries import Delivery

K = TypeVar("K")


class PendingIndex(Generic[K]):
    """Ids by key, in the order in which they came.

    Args:
        key: what a delivery has in common with others; None: it is not listed.
    """

    def __init__(self, key: Callable[[Delivery], K | None]) -> None:
        self._key = key
        self._ids: dict[K, dict[str, None]] = {}
        self.total = 0
        """Of all keys."""

    def add(self, delivery: Delivery) -> None:
        """List a delivery; it may be listed already."""
        if (key := self._key(delivery)) is not None:
            ids = self._ids.setdefault(key, {})
            self.total += delivery.delivery_id not in ids
            ids[delivery.delivery_id] = None

    def remove(self, delivery: Delivery) -> None:
        """A delivery is final."""
        key = self._key(delivery)
        if key is not None and (ids := self._ids.get(key)) is not None:
            self.total -= delivery.delivery_id in ids
            ids.pop(delivery.delivery_id, None)
            if not ids:
                del self._ids[key]

    def count(self, key: K) -> int:
        """How many have that key. From any thread."""
        return len(self._ids.get(key, ()))

    def get(self, key: K) -> Sequence[str]:
        """The ids with that key."""
        return tuple(self._ids.get(key, ()))

    def keep(self, kept: Container[str]) -> None:
        """Drop all others."""
        for key, ids in list(self._ids.items()):
            left = {one: None for one in ids if one in kept}
            if left:
                self._ids[key] = left
            else:
                del self._ids[key]
        self.total = sum(map(len, self._ids.values()))
