"""What the bus holds: runs, issues and deliveries, from the start to the end seen first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from tocsin.bus.port import EARLIEST, Bus, Partition, Record
from tocsin.bus.reading import read_to_end
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring, IssueState
from tocsin.schemas.records.runs import RunView
from tocsin.schemas.records.stops import StopRequested
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import (
    ISSUE_PARTITIONS,
    TELEMETRY_PARTITIONS,
    Topics,
    issue_partition,
    telemetry_partition,
)


@dataclass(frozen=True, slots=True)
class StateSeen:
    """An issue came into a state: when (append time of what decided it), and at which step."""

    state: IssueState
    at_ms: int
    step: int | None


@dataclass(frozen=True, slots=True)
class CommandSeen:
    """A stop command as it stands on the control topic, and when it came there."""

    command: StopRequested
    append_ms: int


@dataclass(frozen=True, slots=True)
class BusView:
    """What a reading command shows; issues in order of occurrence, each in its newest state,
    but with the gravest severity that it had and where it first began.

    `states` has all states of each issue, by its id, in the order in which they came.
    """

    runs: Sequence[RunView]
    issues: Sequence[IssueFiring]
    deliveries: Sequence[Delivery]
    states: Mapping[str, Sequence[StateSeen]] = field(default_factory=dict)

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
    issues: dict[str, IssueFiring] = {}
    states: dict[str, dict[tuple[IssueState, int], StateSeen]] = {}
    deliveries: dict[bytes, Delivery] = {}
    runs = await _runs(bus, [Partition(topics.runs, n) for n in telemetry])
    async for record in read_all(bus, [Partition(topics.issues, n) for n in issue]):
        found = event_data(record)
        if isinstance(found, IssueFiring):
            issues[found.issue_id] = found.overall()
            # A record that was sent twice is one state.
            seen = StateSeen(found.state, found.at_ms, found.step)
            states.setdefault(found.issue_id, {}).setdefault((seen.state, seen.at_ms), seen)
    async for record in read_all(bus, [Partition(topics.actions, n) for n in issue]):
        delivery = event_data(record)
        if isinstance(delivery, Delivery):
            deliveries[record.key] = delivery
        elif record.value is None:
            deliveries.pop(record.key, None)
    return BusView(
        runs=[view for view in runs if run_id in (None, view.run_id)],
        issues=sorted(
            (found for found in issues.values() if run_id in (None, found.run_id)),
            key=lambda found: (found.onset_ms, found.first_step or 0),
        ),
        deliveries=sorted(
            (delivery for delivery in deliveries.values() if run_id in (None, delivery.run_id)),
            key=lambda delivery: delivery.created_ms,
        ),
        states={issue_id: list(seen.values()) for issue_id, seen in states.items()},
    )


async def read_runs(bus: Bus, topics: Topics) -> Sequence[RunView]:
    """The newest view of each run, the first started first.

    Raises:
        UnknownTopic: the bus was never set up.
        BusUnavailable: it does not answer.
    """
    return await _runs(bus, [Partition(topics.runs, n) for n in range(TELEMETRY_PARTITIONS)])


async def read_commands(bus: Bus, topics: Topics, run_id: str) -> Mapping[str, CommandSeen]:
    """The stop commands to a run by command id: of each incarnation the newest, unverified.

    Raises:
        UnknownTopic: the bus was never set up.
        BusUnavailable: it does not answer.
    """
    commands: dict[str, CommandSeen] = {}
    async for record in read_all(bus, [Partition(topics.control, issue_partition(run_id))]):
        command = event_data(record) if record.key.startswith(f"{run_id}/".encode()) else None
        if isinstance(command, StopRequested) and command.run_id == run_id:
            # A sender that died before it knew sends the same again.
            commands.setdefault(command.command_id, CommandSeen(command, record.append_ms))
    return commands


async def _runs(bus: Bus, partitions: Sequence[Partition]) -> Sequence[RunView]:
    runs: dict[bytes, RunView] = {}
    async for record in read_all(bus, partitions):
        view = event_data(record)
        if isinstance(view, RunView):
            runs[record.key] = view
        elif record.value is None:
            runs.pop(record.key, None)
    return sorted(runs.values(), key=lambda view: view.started_ms)


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


def event_data(record: Record) -> Data | None:
    """The event's data; None for a tombstone or a record that this release does not read."""
    if record.value is None:
        return None
    try:
        found = decode(read_meta(record.headers), record.value)
    except RecordError:
        return None
    return found.data if isinstance(found, Event) else None
