"""Writes the ledger: each new state goes into it, and onto the bus as a record."""

from __future__ import annotations

from collections.abc import Iterable

from tocsin.actions.decision.retry import Decision
from tocsin.actions.delivery.failure_reports import FailureReports
from tocsin.actions.delivery.records import delivery_record, tombstone
from tocsin.actions.ledger.ledger import Change, Ledger
from tocsin.bus.port import Outgoing, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.wire import BOOT
from tocsin.schemas.topics import Topics


class LedgerWriter:
    """The one writer of a ledger, so that each state is written once.

    Attributes:
        failures: reports what could not be delivered.
    """

    def __init__(
        self, ledger: Ledger, topics: Topics, failures: FailureReports, metrics: Metrics
    ) -> None:
        self.failures = failures
        self._ledger = ledger
        self._topics = topics
        self._metrics = metrics
        self._records: list[Outgoing] = []
        self._boot = new_id()
        # When the issue of a delivery was appended to the bus; not known after a restart.
        self._appended_ms: dict[str, int] = {}

    def appended(self, delivery_id: str, at_ms: int) -> None:
        """When the issue of a new delivery was appended to the bus; its age is measured."""
        self._appended_ms[delivery_id] = at_ms

    def drop(self, delivery: Delivery) -> None:
        """Another worker has ended a delivery."""
        self._appended_ms.pop(delivery.delivery_id, None)

    def wrote(self, record: Record) -> bool:
        """Whether a record is of what is in the ledger since it was written."""
        return record.header(BOOT) == self._boot.encode()

    def release(self) -> None:
        """Forget what is not in the ledger any more."""
        # What was written before may be read, and be news, when the partitions are back.
        self._boot = new_id()
        mine = {delivery.delivery_id for delivery in self._ledger.pending()}
        self._appended_ms = {one: at for one, at in self._appended_ms.items() if one in mine}

    def change(self, changes: Iterable[Change], now_ms: int) -> None:
        """Write changes one by one: what comes later may depend on those before."""
        for entry, decision in changes:
            if decision is None:
                self.publish(self._ledger.write(entry), now_ms)
            else:
                self.decide(entry, decision, now_ms)

    def decide(self, delivery: Delivery, decision: Decision, now_ms: int) -> None:
        """Write what was decided about a delivery."""
        self.publish(self._ledger.decided(delivery, decision, now_ms), now_ms, delivery)

    def publish(self, delivery: Delivery, now_ms: int, before: Delivery | None = None) -> None:
        """Put an entry that is in the ledger onto the bus; `before` is its state until now."""
        self._records.append(delivery_record(self._topics, delivery, self._boot))
        self._records += self.failures.records(self._topics, delivery, before, now_ms)
        if delivery.final:
            self._metrics.add(names.DELIVERIES, kind=delivery.kind, state=delivery.state)
            since_ms = self._appended_ms.pop(delivery.delivery_id, delivery.created_ms)
            if delivery.state == "delivered":
                took_s = max(0, now_ms - since_ms) / 1000
                self._metrics.observe(names.DELIVERY, took_s, kind=delivery.kind)

    def remove_outdated(self, now_ms: int) -> None:
        """Remove final entries that have been kept for long enough."""
        outdated = self._ledger.outdated(now_ms)
        self._records += [tombstone(self._topics, settled) for settled in outdated]

    def drain(self) -> list[Outgoing]:
        """The records since the last call."""
        records, self._records = self._records, []
        return records
