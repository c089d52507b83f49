"""Reading a bus from its start to the end seen first, into a view of its runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from tocsin.bus.port import EARLIEST, Bus, From, Partition, Record
from tocsin.bus.reading import read_to_end
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.configurations import WORKERS_PARTITION, ConfigurationRefused
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView
from tocsin.schemas.records.wire import read_event
from tocsin.schemas.topics import (
    ISSUE_PARTITIONS,
    TELEMETRY_PARTITIONS,
    Topics,
    TopicSpec,
    issue_partition,
    telemetry_partition,
)


async def read_view(bus: Bus, topics: Topics, run_id: str | None = None) -> RunsView:
    """Read runs, issues and deliveries: of one run, or of all.

    Raises:
        UnknownTopic: the bus was never set up.
        BusUnavailable: it does not answer.
    """
    return await _view(bus, run_id, view_partitions(topics, run_id))


async def read_runs(bus: Bus, topics: Topics) -> RunsView:
    """Read the runs alone. Raises what `read_view` does."""
    return await _view(
        bus, None, [Partition(topics.runs, number) for number in range(TELEMETRY_PARTITIONS)]
    )


async def read_commands(bus: Bus, topics: Topics, run_id: str) -> Mapping[str, CommandSeen]:
    """The stop commands to a run by command id: of each incarnation the newest, unverified.

    Raises what `read_view` does.
    """
    control = Partition(topics.control, issue_partition(run_id))
    return (await _view(bus, run_id, [control])).commands


async def read_refused(bus: Bus, topics: Topics) -> Sequence[ConfigurationRefused]:
    """The configurations that workers refuse now, by worker. Raises what `read_view` does."""
    return (await _view(bus, None, [workers_partition(topics)])).refused


async def read_issue_events(bus: Bus, topics: Topics) -> Sequence[tuple[int, Event[Data]]]:
    """All issues and people's answers to them, each with its append time, in the order of these.

    Records that cannot be read are passed over. Raises what `read_view` does.
    """
    found: list[tuple[int, Event[Data]]] = []
    partitions = [Partition(topics.issues, number) for number in range(ISSUE_PARTITIONS)]
    async for record in read_all(bus, partitions):
        with contextlib.suppress(RecordError):
            event = None if record.value is None else read_event(record)
            if event is not None and isinstance(event.data, IssueFiring | Feedback):
                found.append((record.append_ms, event))
    return sorted(found, key=lambda one: one[0])


async def count_since(bus: Bus, specs: Sequence[TopicSpec], at_ms: int) -> dict[str, int]:
    """How many offsets of each topic were given since that time (Unix milliseconds).

    Records that compaction has taken away since are among them. Raises what `read_view` does.
    """
    found: dict[str, int] = {}
    for spec in specs:
        partitions = [Partition(spec.name, number) for number in range(spec.partitions)]
        reader = await bus.reader(dict.fromkeys(partitions, From.time(at_ms)))
        try:
            ends = await reader.ends(partitions)
            starts = [await reader.position(partition) for partition in partitions]
        finally:
            await reader.close()
        pairs = zip(partitions, starts, strict=True)
        found[spec.name] = sum(max(0, ends[partition] - start) for partition, start in pairs)
    return found


def workers_partition(topics: Topics) -> Partition:
    """Where the configurations are that workers refuse."""
    return Partition(topics.control, WORKERS_PARTITION)


def view_partitions(
    topics: Topics, run_id: str | None = None, *, control: bool = False
) -> Sequence[Partition]:
    """Where the runs, issues and deliveries are, and the stop commands if `control`: of one run, or
    of all.
    """
    runs = range(TELEMETRY_PARTITIONS) if run_id is None else [telemetry_partition(run_id)]
    others = range(ISSUE_PARTITIONS) if run_id is None else [issue_partition(run_id)]
    return [
        *(Partition(topics.runs, number) for number in runs),
        *(Partition(topics.issues, number) for number in others),
        *(Partition(topics.actions, number) for number in others),
        *(Partition(topics.control, number) for number in others if control),
    ]


async def _view(bus: Bus, run_id: str | None, partitions: Sequence[Partition]) -> RunsView:
    view = RunsView(run_id)
    async for record in read_all(bus, partitions):
        view.apply(record)
    return view


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
