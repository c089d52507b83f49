"""The action service in virtual time: what it would send and stop, without a bus or a receiver.

The service, its decisions and its ledger are the real ones. Receivers are not made: each attempt is
noted, and succeeds at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tocsin.actions.config import decisions_of, routing_of
from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.failure_reports import FailureReports
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.actions.receivers.build import receiver_queue
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.bus.port import Partition, Record
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import (
    ISSUE_PARTITIONS,
    Topics,
    issue_partition,
    telemetry_partition,
)

_TOPICS = Topics()


@dataclass(frozen=True, slots=True)
class Sent:
    """A notice or a stop that left, and when."""

    at_ms: int
    notice: Notice

    @property
    def delivery(self) -> Delivery:
        """Its entry in the ledger, from before the attempt."""
        return self.notice.delivery


class Simulation:
    """One configuration, and the time. Use it in one event loop.

    Args:
        config: without problems.
        path: where it came from, so that decisions name its lines.
        now_ms: when it begins.

    Attributes:
        sent: what left, in order.
        deliveries: the newest state of each entry of the ledger, the first created first.
    """

    def __init__(self, config: Config, *, path: Path | None, now_ms: int) -> None:
        kinds = ReceiverKinds()
        self.now_ms = now_ms
        self.sent: list[Sent] = []
        self.deliveries: dict[str, Delivery] = {}
        self._offset = 0
        self._service = ActionsService(
            _TOPICS,
            Setup(
                decisions_of(config, routing_of(config, path=path)),
                {
                    STOP: ReceiverQueue(self._attempt("requested")),
                    **{
                        name: receiver_queue(kinds.kind_of(one), one, self._attempt("sent"))
                        for name, one in config.receivers.items()
                    },
                },
                FailureReports.from_config(config),
                prices=config.prices,
            ),
        )
        self._nudged = False
        self._service.attached(Attachment(nudge=self._nudge))

    async def apply(self, *events: Event[Data]) -> None:
        """Read these from the bus, now: issues, answers to them, and views of runs."""
        await self._round([self._record(event) for event in events])

    async def until(self, at_ms: int) -> None:
        """Go on to a time, from one thing that is due to the next."""
        while (due_ms := self._service.next_due_ms()) is not None and due_ms <= at_ms:
            self.now_ms = max(self.now_ms, due_ms)
            await self._round([])
        self.now_ms = max(self.now_ms, at_ms)
        await self._round([])

    def _attempt(self, done: str) -> Callable[[Notice], Awaitable[Outcome]]:
        async def attempt(notice: Notice) -> Outcome:
            for one in (notice.delivery, *notice.others):
                self.sent.append(Sent(self.now_ms, replace(notice, delivery=one, others=())))
            return Outcome(done=done)

        return attempt

    def _record(self, event: Event[Data]) -> Record:
        assert isinstance(event.data, Issue | Feedback | RunView)
        run_id = event.data.run_id
        partition = Partition(_TOPICS.issues, issue_partition(run_id))
        if isinstance(event.data, RunView):
            partition = Partition(_TOPICS.runs, telemetry_partition(run_id))
        return self._numbered(partition, run_id.encode(), event.encode(), meta_of(event).headers())

    def _numbered(
        self, partition: Partition, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]]
    ) -> Record:
        self._offset += 1
        return Record(partition, self._offset, self.now_ms, key, value, tuple(headers))

    def _nudge(self) -> None:
        self._nudged = True

    async def _round(self, records: list[Record]) -> None:
        """Have the service work until nothing comes of it any more."""
        tick = Tick(self.now_ms, frozenset(range(ISSUE_PARTITIONS)))
        busy = True
        while busy:
            self._nudged = False
            self._service.apply(records, tick)
            records, busy = [], False
            for made in self._service.outputs():
                busy = True
                if made.value is None:
                    continue
                if made.partition.topic == _TOPICS.issues:
                    records.append(
                        self._numbered(made.partition, made.key, made.value, made.headers)
                    )
                elif made.partition.topic == _TOPICS.actions:
                    delivery = EVENT_TYPES.decode(made.value).data
                    if isinstance(delivery, Delivery):
                        self.deliveries[delivery.delivery_id] = delivery
            await self._service.checkpointed(self.now_ms)
            # An attempt waits for nothing, so each ends in one turn of the event loop.
            await asyncio.sleep(0)
            busy = busy or self._nudged
