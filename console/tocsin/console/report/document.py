"""The JSON form of a report. Fields are only added within a version; the schema is generated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.console.report.report import Report
from tocsin.console.report.section import Figure, Section, Status
from tocsin.schemas.records.events import Model
from tocsin.schemas.records.real import Real


class FigureDocument(Model):
    """A named number."""

    name: str
    value: Real | str
    unit: str | None = Field(
        default=None, description="s, bytes, bytes/s, percent, or a word; None: it has none"
    )


class TableDocument(Model):
    """Rows of text, as people read them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class ParagraphDocument(Model):
    """Lines under a heading."""

    heading: str
    lines: tuple[str, ...]


class SectionDocument(Model):
    """One section; charts are not part of this form."""

    key: str = Field(description="never changes", examples=["step_durations"])
    title: str
    status: Status = Field(
        description="the highest severity that was found; good; plain: facts alone; not_captured"
    )
    finding: str
    advice: str = Field(description="what to do; empty: nothing")
    figures: tuple[FigureDocument, ...]
    tables: tuple[TableDocument, ...]
    paragraphs: tuple[ParagraphDocument, ...]
    parts: tuple[SectionDocument, ...] = Field(description="the issues, in the section `issues`")


class ReportDocument(Model):
    """What `tocsin report RUN --format json` prints."""

    version: Literal[1] = 1
    run_id: str
    incarnation: str
    made_ms: int = Field(description="when the report was made, Unix milliseconds")
    status: Status
    verdict: str = Field(description="one paragraph")
    facts: tuple[FigureDocument, ...]
    sections: tuple[SectionDocument, ...]


def document_of(report: Report) -> ReportDocument:
    """The report in its JSON form."""
    return ReportDocument(
        run_id=report.run_id,
        incarnation=report.incarnation,
        made_ms=report.made_ms,
        status=report.status,
        verdict=report.verdict,
        facts=tuple(map(_figure, report.facts)),
        sections=tuple(map(_section, report.sections)),
    )


def to_json(report: Report) -> str:
    """The report as JSON text, indented; numbers that JSON lacks are "NaN", "Infinity"."""
    return document_of(report).model_dump_json(indent=2)


def _figure(figure: Figure) -> FigureDocument:
    return FigureDocument(name=figure.name, value=figure.value, unit=figure.unit)


def _section(section: Section) -> SectionDocument:
    return SectionDocument(
        key=section.key,
        title=section.title,
        status=section.status,
        finding=section.finding,
        advice=section.advice,
        figures=tuple(map(_figure, section.figures)),
        tables=tuple(
            TableDocument(
                caption=table.caption,
                columns=tuple(table.columns),
                rows=tuple(tuple(row) for row in table.rows),
            )
            for table in section.tables
        ),
        paragraphs=tuple(
            ParagraphDocument(heading=one.heading, lines=tuple(one.lines))
            for one in section.paragraphs
        ),
        parts=tuple(map(_section, section.parts)),
    )
