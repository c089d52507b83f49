"""Publishes signed stop commands, as the ledger keeps them."""

from __future__ import annotations

from typing import Final

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue
from tocsin.actions.delivery.stop_command import signed_record
from tocsin.bus.port import Bus, BusUnavailable, Producer
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import Topics

_AT_ONCE: Final = 1_000


class StopPublisher:
    """Publishes with its own producer, so that no notice delays a stop."""

    def __init__(self, bus: Bus, topics: Topics, key: SigningKey) -> None:
        self._bus = bus
        self._topics = topics
        self._key = key
        self._producer: Producer | None = None

    def queue(self) -> ReceiverQueue:
        """How the action `stop` is delivered."""
        return ReceiverQueue(self.publish, at_once=_AT_ONCE)

    async def publish(self, notice: Notice) -> Outcome:
        """One attempt. Raises RecordError: the entry holds no stop command."""
        record = signed_record(self._topics, notice.delivery.event or {}, self._key)
        try:
            if self._producer is None:
                self._producer = await self._bus.producer()
            await self._producer.publish([record])
        except BusUnavailable:
            return Outcome(failure="bus away")
        return Outcome(sent=True)

    async def close(self) -> None:
        """Close the producer."""
        if self._producer is not None:
            await self._producer.close()
