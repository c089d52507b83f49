"""Past telemetry: taken from a bus, put onto one, and evaluated once more by the same rules.

An evaluation writes nothing: it is the service of the workers (`tocsin.stream_rules.service`) that
is given the records in their order. Time is their append time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from tocsin.bus.port import EARLIEST, Bus, From, Outgoing, Partition, Record
from tocsin.bus.reading import read_to_end
from tocsin.console.fleet.dump import Dump, DumpWriter
from tocsin.console.views.bus_view import read_runs
from tocsin.console.views.selection import choose_run
from tocsin.runtime.service import CaughtUp, Tick
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.text import plain_line, time_text
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.service import RulesService, build_rules_service

LOADED: Final = ("telemetry", "runs", "issues", "dlq")
"""Topics that may be dumped and loaded. Commands, the ledger and states mean nothing elsewhere."""

_BATCH: Final = 500
_SETTLE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Span:
    """Of which records: of one run, or of all; appended in [from_ms, to_ms], Unix milliseconds."""

    run_id: str | None = None
    from_ms: int = 0
    to_ms: int | None = None

    def has(self, record: Record) -> bool:
        """Whether a record is in it."""
        return (
            (self.run_id is None or record.key == self.run_id.encode())
            and record.append_ms >= self.from_ms
            and (self.to_ms is None or record.append_ms <= self.to_ms)
        )


def topic_name(topics: Topics, short: str) -> str:
    """The topic of that short name. Raises ConfigurationError: it is none of `LOADED`."""
    if short not in LOADED:
        raise ConfigurationError(f"--topic {short}: expected one of {', '.join(LOADED)}")
    return f"{topics.prefix}.{short}.v1"


async def read_span(
    bus: Bus, topics: Topics, short: str, span: Span
) -> AsyncGenerator[Record, None]:
    """The records of a topic that are on the bus now, partition by partition.

    Raises:
        ConfigurationError: it is none of `LOADED`. BusError: the bus does not answer.
    """
    name = topic_name(topics, short)
    counts = {spec.name: spec.partitions for spec in topics.specs()}
    numbers: Iterable[int] = range(counts[name])
    if span.run_id is not None and short != "dlq":
        numbers = [telemetry_partition(span.run_id) % counts[name]]
    start = From.time(span.from_ms) if span.from_ms else EARLIEST
    for number in numbers:
        partition = Partition(name, number)
        reader = await bus.reader({partition: start})
        try:
            ends = await reader.ends([partition])
            async for records in read_to_end(reader, ends):
                for record in records:
                    if record.offset < ends[partition] and span.has(record):
                        yield record
        finally:
            await reader.close()


async def run_with_records(bus: Bus, topics: Topics, text: str) -> str:
    """The run of that id, also one that no rules have seen; else the one whose id begins so.

    Raises:
        ConfigurationError: there is none, or there are several. BusError: the bus does not answer.
    """
    known = await read_runs(bus, topics)
    if known.run(text) is not None:
        return text
    async with aclosing(read_span(bus, topics, "telemetry", Span(text))) as records:
        async for _ in records:
            return text
    return choose_run(known.runs, text).run_id


async def dump(
    bus: Bus, topics: Topics, path: Path, shorts: Sequence[str], span: Span, now_ms: int
) -> int:
    """Write records of a bus to a file that is not there yet; how many.

    Raises:
        ConfigurationError: the file is there, or a topic is none of `LOADED`.
        BusError: the bus does not answer; the file has what came before.
    """
    for short in shorts:
        topic_name(topics, short)
    with DumpWriter(path, taken_ms=now_ms, url=bus.url, prefix=topics.prefix) as file:
        for short in shorts:
            async for record in read_span(bus, topics, short, span):
                file.add(short, record)
        return file.records


async def load(bus: Bus, topics: Topics, source: Dump, shorts: Sequence[str], span: Span) -> int:
    """Publish records of a dump, each on the partition that it was on; how many.

    The bus gives them new append times and offsets.

    Raises:
        ConfigurationError: a line of the file is wrong. BusError: the bus does not answer; in both
            cases the records before are on the bus.
    """
    names = {short: topic_name(topics, short) for short in shorts}
    producer = await bus.producer()
    count = 0
    batch: list[Outgoing] = []
    try:
        for short, record in source.records():
            if short in names and span.has(record):
                place = Partition(names[short], record.partition.number)
                batch.append(Outgoing(place, record.key, record.value, record.headers))
            if len(batch) >= _BATCH:
                await producer.publish(batch)
                count += len(batch)
                batch.clear()
        if batch:
            await producer.publish(batch)
        return count + len(batch)
    finally:
        await producer.close()


@dataclass(slots=True)
class Evaluation:
    """What rules find in past telemetry.

    Attributes:
        events: issues and their states, and views of the runs, each with its time, in order.
        unusable: how many records could not be used.
        seconds: how long it took.
        span_s: how much time the records cover, from the first to the last.
    """

    events: list[tuple[int, Event[Data]]] = field(default_factory=list)
    records: int = 0
    unusable: int = 0
    seconds: float = 0.0
    span_s: float = 0.0

    @property
    def issues(self) -> list[IssueFiring]:
        """The issues in all their states."""
        return [e.data for _, e in self.events if isinstance(e.data, IssueFiring)]

    @property
    def views(self) -> list[RunView]:
        """The views, of each run the newest last."""
        return [e.data for _, e in self.events if isinstance(e.data, RunView)]


def evaluate(
    records: Sequence[Record],
    config: Config,
    *,
    folder: Path | None,
    until_ms: int | None,
    others: Sequence[Record] = (),
) -> Evaluation:
    """What the rules of a configuration find in these records of telemetry. Blocks.

    Args:
        records: in the order of their offsets in each partition.
        folder: where relative paths of custom rules start.
        until_ms: all that was appended before is in `records`: timers fire up to then.
        others: records of runs that rules compare with, where they are not among `records`.

    Raises:
        ConfigurationError: a rule or its parameters are wrong, or a custom rule cannot be loaded.
    """
    found = Evaluation(records=len(records))
    service = build_rules_service(Topics(), config, folder=folder)
    started = time.perf_counter()
    try:
        service.consult(others)
        numbers: set[int] = set()
        now_ms = 0
        for batch in _batches(records):
            numbers.update(record.partition.number for record in batch)
            now_ms = max(now_ms, batch[-1].append_ms)
            _round(service, found, batch, Tick(now_ms, frozenset(numbers)))
        if records:
            times = [record.append_ms for record in records]
            found.span_s = (max(times) - min(times)) / 1000
        if until_ms is not None and numbers:
            caught_up = {number: CaughtUp(until_ms, 0) for number in numbers}
            now_ms = max(now_ms, until_ms)
            _round(service, found, (), Tick(now_ms, frozenset(numbers), caught_up))
        _save(service, found, frozenset(numbers), now_ms)
    finally:
        service.close()
    found.events.sort(key=lambda one: one[0])
    found.seconds = time.perf_counter() - started
    return found


def _batches(records: Sequence[Record]) -> Iterator[list[Record]]:
    for at in range(0, len(records), _BATCH):
        yield list(records[at : at + _BATCH])


def _round(service: RulesService, found: Evaluation, batch: Sequence[Record], tick: Tick) -> None:
    # The topic of another team is read as that of this service.
    own = [_moved(record, service.inputs[0]) for record in batch]
    found.unusable += len(service.apply(own, tick))
    _collect(found, service.outputs())
    if service.has_custom:
        _save(service, found, tick.owned, tick.now_ms)


def _save(service: RulesService, found: Evaluation, numbers: frozenset[int], now_ms: int) -> None:
    """Wait for the custom rules, and take what they found, and the views."""
    deadline = time.monotonic() + _SETTLE_S
    while not service.settled() and time.monotonic() < deadline:
        time.sleep(0.005)
        service.apply((), Tick(now_ms, numbers))
    _collect(found, service.snapshots(force=True))
    _collect(found, service.outputs())


def _collect(found: Evaluation, written: Iterable[Outgoing]) -> None:
    for one in written:
        topic = one.partition.topic.split(".")[-2]
        if one.value is not None and topic in ("issues", "runs"):
            event = EVENT_TYPES.decode(one.value)
            found.events.append((event.time_ms, event))


def _moved(record: Record, topic: str) -> Record:
    if record.partition.topic == topic:
        return record
    place = Partition(topic, record.partition.number)
    return Record(place, record.offset, record.append_ms, record.key, record.value, record.headers)


def issue_lines(issues: Iterable[IssueFiring]) -> list[str]:
    """For people: by run, in the order of time."""
    ordered = sorted(issues, key=lambda one: (one.run_id, one.at_ms))
    lines: list[str] = []
    for run, group in groupby(ordered, key=lambda one: one.run_id):
        lines.append(plain_line(f"run {run}"))
        lines += [f"  {_line(one)}" for one in group]
    return lines


def _line(issue: IssueFiring) -> str:
    text = f"{issue.rule} {issue.severity} {issue.state}: {issue.reason}"
    return f"{time_text(issue.at_ms)}  {plain_line(text)}"


def issue_differences(old: Evaluation, new: Evaluation) -> list[tuple[str, IssueFiring]]:
    """The states of issues that one evaluation has and the other has not: `-` or `+`, by run and
    time. The same state with another severity is both. Pure."""
    before = {_key(one): one for one in old.issues}
    after = {_key(one): one for one in new.issues}
    found = [("-", one) for key, one in before.items() if key not in after]
    found += [("+", one) for key, one in after.items() if key not in before]
    return sorted(found, key=lambda one: (one[1].run_id, one[1].at_ms, one[0] == "+"))


def difference_lines(found: Iterable[tuple[str, IssueFiring]]) -> list[str]:
    """For people: by run, like a diff."""
    lines: list[str] = []
    for run, group in groupby(found, key=lambda one: one[1].run_id):
        lines.append(plain_line(f"run {run}"))
        lines += [f"  {sign} {_line(issue)}" for sign, issue in group]
    return lines


def _key(issue: IssueFiring) -> tuple[str, str, str, int]:
    return issue.issue_id, issue.state, issue.severity, issue.at_ms


def issue_facts(found: Evaluation) -> dict[str, JsonValue]:
    """For programs: what was read, and the issues in all their states."""
    return {
        "records": found.records,
        "unusable": found.unusable,
        "issues": [_facts(one) for one in found.issues],
    }


def difference_facts(found: Iterable[tuple[str, IssueFiring]]) -> dict[str, JsonValue]:
    """For programs."""
    return {"issues": [{"sign": sign, **_facts(one)} for sign, one in found]}


def _facts(issue: IssueFiring) -> dict[str, JsonValue]:
    return {"state": issue.state, **issue.model_dump(mode="json", exclude_none=True)}


def compared_runs(config: Config) -> frozenset[str]:
    """The runs that rules of the configuration compare others with. Pure.

    Raises:
        ConfigurationError: a rule or its parameters are wrong.
    """
    specs = rule_specs(config.rules, defaults=config.defaults.rules)
    return frozenset(run for spec in specs for run in spec.build().other_runs())
