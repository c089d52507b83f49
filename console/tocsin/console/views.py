"""What the bus holds: runs, issues and deliveries, from the start to the end seen first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tocsin.bus.port import EARLIEST, Bus, Partition, Record
from tocsin.bus.reading import read_to_end
from tocsin.schemas.deliveries import Delivery
from tocsin.schemas.errors import RecordError
from tocsin.schemas.events import Data, Event
from tocsin.schemas.issues import IssueFiring
from tocsin.schemas.runs import RunView
from tocsin.schemas.topics import (
    ISSUE_PARTITIONS,
    TELEMETRY_PARTITIONS,
    Topics,
    issue_partition,
    telemetry_partition,
)
from tocsin.schemas.wire import decode, read_meta


@dataclass(frozen=True, slots=True)
class BusView:
    """What a reading command shows; issues in order of occurrence, each in its newest state."""

    runs: Sequence[RunView]
    issues: Sequence[IssueFiring]
    deliveries: Sequence[Delivery]

    def run(self, run_id: str) -> RunView | None:
        """The newest view of that run."""
        return next((view for view in self.runs if view.run_id == run_id), None)


async def read_view(bus: Bus, topics: Topics, run_id: str | None = None) -> BusView:
    """Read runs, issues and deliveries: of one run, or of all.

    Raises:
        UnknownTopic: the bus was never set up.
        BusUnavailable: it does not answer.
    """
    telemetry = range(TELEMETRY_PARTITIONS) if run_id is None else [telemetry_partition(run_id)]
    issue = range(ISSUE_PARTITIONS) if run_id is None else [issue_partition(run_id)]
    runs: dict[bytes, RunView] = {}
    issues: dict[str, IssueFiring] = {}
    deliveries: dict[bytes, Delivery] = {}
    async for record in read_all(bus, [Partition(topics.runs, n) for n in telemetry]):
        view = _data(record)
        if isinstance(view, RunView):
            runs[record.key] = view
        elif record.value is None:
            runs.pop(record.key, None)
    async for record in read_all(bus, [Partition(topics.issues, n) for n in issue]):
        found = _data(record)
        if isinstance(found, IssueFiring):
            issues[found.issue_id] = found
    async for record in read_all(bus, [Partition(topics.actions, n) for n in issue]):
        delivery = _data(record)
        if isinstance(delivery, Delivery):
            deliveries[record.key] = delivery
        elif record.value is None:
            deliveries.pop(record.key, None)
    return BusView(
        runs=sorted(
            (view for view in runs.values() if run_id in (None, view.run_id)),
            key=lambda view: view.started_ms,
        ),
        issues=sorted(
            (found for found in issues.values() if run_id in (None, found.run_id)),
            key=lambda found: (found.onset_ms, found.first_step or 0),
        ),
        deliveries=sorted(
            (delivery for delivery in deliveries.values() if run_id in (None, delivery.run_id)),
            key=lambda delivery: delivery.created_ms,
        ),
    )


async def read_all(bus: Bus, partitions: Sequence[Partition]) -> AsyncIterator[Record]:
    """Each record from the start of each partition to the end seen at the call.

    Raises:
        UnknownTopic: the bus was never set up.
        BusUnavailable: it does not answer, or nothing came for 10 s.
    """
    reader = await bus.reader(dict.fromkeys(partitions, EARLIEST))
    try:
        ends = await reader.ends(partitions)
        async for records in read_to_end(reader, ends):
            for record in records:
                if record.offset < ends[record.partition]:
                    yield record
    finally:
        await reader.close()


def _data(record: Record) -> Data | None:
    """The event's data; None for a tombstone or a record that this release does not read."""
    if record.value is None:
        return None
    try:
        found = decode(read_meta(record.headers), record.value)
    except RecordError:
        return None
    return found.data if isinstance(found, Event) else None
