"""The Markdown form of a report: its text and tables, without charts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tocsin.console.report.report import Report
from tocsin.console.report.section import Section, Table
from tocsin.schemas.text import plain_line, time_text

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>|#~])")


def to_markdown(report: Report) -> str:
    """The report for a merge request, a wiki, a terminal."""
    return "\n".join(_lines(report)) + "\n"


def escaped(text: str) -> str:
    """Text of anybody that Markdown, and HTML in it, leave as it is."""
    return _SPECIAL.sub(r"\\\1", plain_line(text))


def _lines(report: Report) -> Iterator[str]:
    yield f"# Run {escaped(report.run_id)}: {report.status}"
    yield ""
    yield escaped(report.verdict)
    yield ""
    facts = [(figure.name, figure.text) for figure in report.facts]
    yield from _table(Table(("what", "value"), facts))
    for section in report.sections:
        yield from _section(section, 2)
    yield ""
    yield f"Made at {time_text(report.made_ms)} by tocsin."


def _section(section: Section, level: int) -> Iterator[str]:
    yield ""
    yield f"{'#' * level} {escaped(section.title)}"
    yield ""
    label = {"not_captured": "Not captured: ", "plain": "", "good": ""}.get(
        section.status, f"**{section.status}** "
    )
    yield f"{label}{escaped(section.finding)}"
    if section.advice:
        yield ""
        yield f"What to do: {escaped(section.advice)}"
    for table in section.tables:
        yield ""
        yield from _table(table)
    for paragraph in section.paragraphs:
        yield ""
        yield f"**{escaped(paragraph.heading)}**"
        yield ""
        yield from (f"- {escaped(line)}" for line in paragraph.lines)
    for part in section.parts:
        yield from _section(part, level + 1)


def _table(table: Table) -> Iterator[str]:
    if table.caption:
        yield f"{escaped(table.caption)}:"
        yield ""
    yield f"| {' | '.join(map(escaped, table.columns))} |"
    marks = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
    yield f"| {' | '.join(marks)} |"
    for row in table.rows:
        yield f"| {' | '.join(map(escaped, row))} |"
