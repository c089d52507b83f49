"""What the bus says of a run that a person wants to stop.

The answers are read from the run's telemetry, where the run itself puts them: the run's view needs
a rules worker that lives. The view, where there is one, says which training is meant; what
telemetry has beyond it is read first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final

from tocsin.bus.port import Bus, From, Partition, Reader, Record
from tocsin.bus.reading import read_to_end
from tocsin.console.views.bus_view import read_all, read_runs
from tocsin.console.views.selection import choose_run
from tocsin.emitter.stop.verification import (
    UNKNOWN_MS,
    Facts,
    Memory,
    SignedCommand,
    decide,
    read_keys,
)
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.runs import RunData
from tocsin.schemas.records.runs_fold import RunSeen
from tocsin.schemas.records.stops.commands import StopAnswer
from tocsin.schemas.records.wire import event_data, read_signature
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

_BACKLOG_MS: Final = 60_000
_SKEW_MS: Final = 60_000  # between the clocks of two brokers


async def find_run(bus: Bus, topics: Topics, text: str) -> tuple[RunSeen, Reader]:
    """The run that is meant, and a reader of all that it says beyond its view."""
    known = await read_runs(bus, topics)
    try:
        view = choose_run(known.runs, text)
    except ConfigurationError:
        # No rules worker has made a view of it. A run that lives sends a heartbeat every 10 s.
        run = RunSeen(text)
        since = From.time(unix_ms() - _BACKLOG_MS)
        reader = await bus.reader({Partition(topics.telemetry, telemetry_partition(text)): since})
        await read_beyond(reader, topics, run)
        if not run.incarnation:
            await reader.close()
            raise
        return run, reader
    place = Partition(topics.telemetry, telemetry_partition(view.run_id))
    return known.seen[view.run_id], await bus.reader({place: From.offset(view.next_offset)})


async def read_beyond(reader: Reader, topics: Topics, run: RunSeen) -> None:
    """Fold in what the run has said up to the end seen at the call."""
    async for data, record in _what_is_there(reader, topics, run.run_id):
        run.add_event(data, offset=record.offset, append_ms=record.append_ms)


async def _what_is_there(
    reader: Reader, topics: Topics, run_id: str
) -> AsyncIterator[tuple[RunData, Record]]:
    ends = await reader.ends([Partition(topics.telemetry, telemetry_partition(run_id))])
    async for records in read_to_end(reader, ends):
        for record in records:
            if (data := run_event(record, run_id)) is not None:
                yield data, record


async def find_unanswered(
    bus: Bus, topics: Topics, run: RunSeen, key_paths: list[Path]
) -> StopView | None:
    """A good command to that training on the bus that nobody has answered yet.

    Only one by a key in `key_paths`: anybody's would keep people from sending theirs.
    """
    facts = Facts(run.run_id, run.incarnation, read_keys(key_paths))
    commands: dict[str, int] = {}
    place = Partition(topics.control, issue_partition(run.run_id))
    async for record in read_all(bus, [place]):
        if record.value is None:
            continue
        signed = SignedCommand(record.key, record.value, read_signature(record.headers))
        verdict = decide(signed, facts, Memory(), unix_ms(), waited_ms=UNKNOWN_MS)
        if verdict.reason == "obey":
            commands.setdefault(verdict.command_id, record.append_ms)
    if not commands:
        return None
    place = Partition(topics.telemetry, telemetry_partition(run.run_id))
    since = From.time(max(0, min(commands.values()) - _SKEW_MS))
    reader = await bus.reader({place: since})
    try:
        async for data, _ in _what_is_there(reader, topics, run.run_id):
            if isinstance(data, StopAnswer):
                commands.pop(data.command_id, None)
    finally:
        await reader.close()
    if not commands:
        return None
    command_id, at_ms = next(iter(commands.items()))
    return StopView(state="requested", command_id=command_id, states={"requested": at_ms})


async def go_back(reader: Reader, topics: Topics, run_id: str, known_ms: Collection[int]) -> None:
    """Read the run's telemetry again from before the first of these moments of its stop."""
    if known_ms:
        place = Partition(topics.telemetry, telemetry_partition(run_id))
        await reader.seek(place, From.time(max(0, min(known_ms) - _SKEW_MS)))


def run_event(record: Record, run_id: str) -> RunData | None:
    """An event of that run's telemetry; None for the numbers, which are most of it."""
    data = event_data(record) if record.key == run_id.encode() else None
    return data if isinstance(data, RunData) and data.run_id == run_id else None
