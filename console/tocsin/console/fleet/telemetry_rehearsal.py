"""What configurations would find in past telemetry, and do about it: `tocsin replay` and `diff`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tocsin.bus.port import Partition, Record
from tocsin.console.configuration.issue_rehearsal import (
    Happened,
    count_issues,
    diff_json,
    diff_text,
    differences,
    rehearse,
    replay_json,
    replay_text,
    starts_and_ends,
)
from tocsin.console.context import CommandContext
from tocsin.console.fleet.dump import open_dump
from tocsin.console.fleet.past_telemetry import (
    Evaluation,
    Span,
    compared_runs,
    difference_facts,
    difference_lines,
    evaluate,
    issue_differences,
    issue_facts,
    issue_lines,
    read_span,
)
from tocsin.schemas.configuration.file import LoadedConfig
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line
from tocsin.schemas.topics import telemetry_partition


@dataclass(frozen=True, slots=True)
class Past:
    """Telemetry; all that was appended before `until_ms` is among it.

    `read_runs` reads the telemetry of other runs, where rules compare with them. It blocks.
    """

    records: Sequence[Record]
    until_ms: int
    read_runs: Callable[[Collection[str]], Sequence[Record]]

    def evaluate(self, loaded: LoadedConfig) -> Evaluation:
        """What the rules of a configuration find. Blocks. Raises ConfigurationError."""
        there = {record.key for record in self.records}
        missing = [run for run in compared_runs(loaded.config) if run.encode() not in there]
        return evaluate(
            self.records,
            loaded.config,
            folder=loaded.folder,
            until_ms=self.until_ms,
            others=self.read_runs(sorted(missing)) if missing else (),
        )


def past_of_dump(path: Path, span: Span) -> Past:
    """What a dump has. Blocks. Raises ConfigurationError: it cannot be read, or has none of it."""
    dump = open_dump(path)
    whole = [record for short, record in dump.records() if short == "telemetry"]
    records = [record for record in whole if span.has(record)]

    def read_runs(runs: Collection[str]) -> Sequence[Record]:
        keys = {name.encode() for name in runs}
        return [record for record in whole if record.key in keys]

    until_ms = dump.taken_ms if span.to_ms is None else min(span.to_ms, dump.taken_ms)
    return Past(_found(records, span), until_ms, read_runs)


async def past_on_bus(context: CommandContext, span: Span, now_ms: int) -> Past:
    """What a bus has now. Raises ConfigurationError: it has none of it. BusError."""

    async def read(wanted: Span) -> list[Record]:
        async with context.open_bus(create=False) as bus:
            return [r async for r in read_span(bus, context.topics, "telemetry", wanted)]

    def read_runs(runs: Collection[str]) -> Sequence[Record]:
        # From the thread of an evaluation.
        return [record for run in runs for record in asyncio.run(read(Span(run)))]

    until_ms = now_ms if span.to_ms is None else min(span.to_ms, now_ms)
    return Past(_found(await read(span), span), until_ms, read_runs)


def past_in_store(context: CommandContext, span: Span, run_id: str) -> Past:
    """What the store has of a run. Blocks.

    Raises:
        ConfigurationError: it has no telemetry of it in this time. StoreError: it cannot be read.
    """
    from tocsin.store.stored import StoredFiles

    store, topics = context.open_store(), context.topics

    def read(run: str) -> list[Record]:
        partition = Partition(topics.telemetry, telemetry_partition(run))
        return [
            Record(partition, one.offset, one.append_ms, one.key, one.value, one.headers)
            for one in StoredFiles(store, run).telemetry(topics)
        ]

    whole = read(run_id)
    until_ms = max((record.append_ms for record in whole), default=0)
    return Past(
        _found([record for record in whole if span.has(record)], span, f"in {store.url}"),
        until_ms if span.to_ms is None else min(span.to_ms, until_ms),
        lambda runs: [record for run in runs for record in read(run)],
    )


def _found(records: Sequence[Record], span: Span, where: str = "") -> Sequence[Record]:
    if not records:
        about = "" if span.run_id is None else f" of run '{plain_line(span.run_id)}'"
        raise ConfigurationError(
            f"no telemetry{about} in this time{where and f' {where}'}; a bus keeps it for a day, a "
            "store (`--archived`) and a dump (`tocsin bus dump`) longer"
        )
    return records


async def replayed(loaded: LoadedConfig, past: Past, *, json_output: bool) -> str:
    """The issues that a configuration finds, and what it would do about them: text, or JSON."""
    found = await asyncio.to_thread(past.evaluate, loaded)
    happened = await _rehearsed(loaded, found)
    events = count_issues(found.events)
    if json_output:
        return replay_json(happened, events=events, more=issue_facts(found))
    lines = issue_lines(found.issues) or ["none"]
    ratio = f", {found.span_s / found.seconds:,.0f} times real time" if found.seconds else ""
    read = f"{found.records:,} records of {found.span_s:,.0f} s in {found.seconds:.1f} s{ratio}"
    bad = f"; {found.unusable:,} could not be used" if found.unusable else ""
    actions_text = replay_text(happened, events=events)
    return "\n".join(["issues:", *lines, f"{read}{bad}", "", "what would be done:", actions_text])


async def compared(
    before: LoadedConfig, after: LoadedConfig, past: Past, *, json_output: bool
) -> str:
    """In which issues two configurations differ, and in what they would do: text, or JSON."""
    old = await asyncio.to_thread(past.evaluate, before)
    new = await asyncio.to_thread(past.evaluate, after)
    issues = issue_differences(old, new)
    found = differences(await _rehearsed(before, old), await _rehearsed(after, new))
    events = count_issues(new.events)
    if json_output:
        return diff_json(found, events=events, more=difference_facts(issues))
    lines = difference_lines(issues) or ["none"]
    actions_text = diff_text(found, events=events)
    return "\n".join(
        ["issues that differ:", *lines, "", "what would be done differently:", actions_text]
    )


async def _rehearsed(loaded: LoadedConfig, found: Evaluation) -> list[Happened]:
    """What the configuration does about what its rules found."""
    view = RunsView()
    for seen in found.views:
        view.add(seen)
    issues = [(at_ms, e) for at_ms, e in found.events if isinstance(e.data, IssueFiring)]
    events = sorted([*starts_and_ends(view), *issues], key=lambda one: one[0])
    return await rehearse(loaded.config, events, path=loaded.path)
