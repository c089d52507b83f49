"""`tocsin bus init` and `tocsin bus show`: the topics, as they are and as they should be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tocsin.bus.port import TopicState


def topics_json(
    url: str,
    states: Sequence[TopicState],
    changed: Sequence[str] = (),
    *,
    counts: Mapping[str, int] | None = None,
) -> str:
    """The topics for programs: one JSON object with `version`, `bus`, `topics` and `changed`.

    `counts` is how many records were written since a time, by topic, where that was asked for.
    """
    topics = [
        {
            **asdict(state.spec),
            "exists": state.exists,
            "records": state.records,
            "size_bytes": state.size_bytes,
            "differs": state.differs,
            **({} if counts is None else {"records_since": counts.get(state.spec.name, 0)}),
        }
        for state in states
    ]
    facts = {"version": 1, "bus": url, "topics": topics, "changed": list(changed)}
    return json.dumps(facts, indent=2)


def print_topics(
    url: str,
    states: Sequence[TopicState],
    console: Console,
    counts: Mapping[str, int] | None = None,
) -> None:
    """A table, and what to do where something is missing or differs; `counts` as in JSON."""
    console.print(f"bus {url}", highlight=False)
    table = Table(box=None, padding=(0, 1))
    # A name is needed whole, to be typed; the line fits into 80 columns with the default prefix.
    records = "records" if counts is None else "new records"
    for heading in ("topic", "parts", "clean-up", "keeps", records, "size", "state"):
        table.add_column(
            heading, no_wrap=True, overflow="fold" if heading == "topic" else "ellipsis"
        )
    for state in states:
        spec = state.spec
        keeps = spec.retention_ms if spec.cleanup == "delete" else None
        table.add_row(
            spec.name,
            str(spec.partitions),
            spec.cleanup,
            "last value" if keeps is None else f"{keeps // 3_600_000} h",
            f"{(counts or {}).get(spec.name, state.records):,}" if state.exists else "-",
            _size(state.size_bytes),
            _verdict(state),
        )
    console.print(table)
    for state in states:
        for difference in state.differs:
            console.print(f"{state.spec.name}: {escape(difference)}", highlight=False)
    if not all(state.exists for state in states):
        console.print("to create missing topics: tocsin bus init", highlight=False)


def _verdict(state: TopicState) -> str:
    if not state.exists:
        return "[red]missing[/]"
    return "[yellow]differs[/]" if state.differs else "[green]ok[/]"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"
