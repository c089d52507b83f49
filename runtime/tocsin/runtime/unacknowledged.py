"""What a service has to say, kept until the bus has acknowledged it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

from tocsin.bus.port import Outgoing, Partition, Producer, record_size
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.schemas.topics import MAX_RECORD_BYTES

logger = logging.getLogger(__name__)

_MAX_RECORDS: Final = 500
_MAX_BYTES: Final = 8 * 1024 * 1024


class Unacknowledged:
    """Records in order; a failed `flush` keeps those that are not acknowledged."""

    def __init__(self, service: str, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._records: list[Outgoing] = []
        self._left_out: set[tuple[Partition, bytes]] = set()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, records: Sequence[Outgoing]) -> None:
        """Add records at the end."""
        self._records += records

    def clear(self) -> None:
        """Drop all: another worker will say it."""
        self._records.clear()
        self._left_out.clear()

    def drop(self, numbers: Collection[int]) -> None:
        """What is left out of these partition numbers is not ours any more."""
        self._left_out = {one for one in self._left_out if one[0].number not in numbers}

    def left_out(self, topics: Collection[str]) -> frozenset[int]:
        """The partition numbers for which a newest record of these topics was over the limit.

        Until one of the same key fits, what it said is nowhere on the bus.
        """
        return frozenset(p.number for p, _ in self._left_out if p.topic in topics)

    async def flush(self, producer: Producer) -> None:
        """Publish all, in slices. Raises BusUnavailable, UnknownTopic."""
        while self._records:
            batch = self._slice()
            oversize = [record for record in batch if record_size(record) > MAX_RECORD_BYTES]
            fitting = batch
            if oversize:
                # We wrote it, so it is a bug; but one that must not stop all other runs.
                fitting = [record for record in batch if record not in oversize]
                self._metrics.add(names.OVERSIZE, len(oversize), service=self._service)
                logger.error(
                    "own record over the limit of the bus, left out",
                    extra={"action": self._service, "records": len(oversize)},
                )
            if fitting:
                await producer.publish(fitting)
            if oversize or self._left_out:
                for record in batch:
                    if record_size(record) > MAX_RECORD_BYTES:
                        self._left_out.add((record.partition, record.key))
                    else:
                        self._left_out.discard((record.partition, record.key))
            del self._records[: len(batch)]
            self._metrics.add(names.OUTPUTS, len(fitting), service=self._service)

    def _slice(self) -> list[Outgoing]:
        size = 0
        for count, record in enumerate(self._records[:_MAX_RECORDS]):
            size += len(record.value or b"")
            if count and size > _MAX_BYTES:
                return self._records[:count]
        return self._records[:_MAX_RECORDS]
