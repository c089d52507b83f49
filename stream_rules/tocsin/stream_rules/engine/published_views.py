"""The views of runs that are on the bus, whoever wrote them: when each was renewed last."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.schemas.topics import VIEW_KEEP_MS


class PublishedViews:
    """By partition and key the append time of the newest view, oldest first. Pure."""

    def __init__(self, topic: str) -> None:
        self._topic: Final = topic
        self._views: Final[dict[int, dict[bytes, int]]] = {}
        self._newest_ms = 0

    def apply(self, record: Record) -> None:
        """A record of the topic, in order per partition."""
        views = self._views.setdefault(record.partition.number, {})
        views.pop(record.key, None)
        if record.value is not None:
            views[record.key] = record.append_ms
            self._newest_ms = max(self._newest_ms, record.append_ms)

    def drop_outdated(self) -> list[Outgoing]:
        """Tombstones for the views that nobody has renewed for `VIEW_KEEP_MS`."""
        gone: list[Outgoing] = []
        for number, views in self._views.items():
            while views:
                key, append_ms = next(iter(views.items()))
                if append_ms > self._newest_ms - VIEW_KEEP_MS:
                    break
                del views[key]
                gone.append(Outgoing(Partition(self._topic, number), key, None))
        return gone

    def release(self, partitions: Collection[int]) -> None:
        """Forget the views of these partitions."""
        for number in partitions:
            self._views.pop(number, None)
