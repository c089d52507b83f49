"""What a section of a report says, apart from how it is shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tocsin.console.charts import value_text

Status = Literal["critical", "warning", "info", "good", "plain", "not_captured"]
"""What a section found: an issue of a severity, something to note (`info`), nothing wrong
(`good`), facts alone (`plain`), or no data."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A named number, or a word; `unit` as charts have it: `s`, `bytes`, `percent`."""

    name: str
    value: float | int | str
    unit: str | None = None

    @property
    def text(self) -> str:
        """The value as people read it."""
        return self.value if isinstance(self.value, str) else value_text(self.value, self.unit)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under named columns; `numeric` are the columns that are set to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Lines under a heading of their own, as the story of an issue has them."""

    heading: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of a report.

    Attributes:
        key: a word that never changes, for links and programs.
        finding: what the numbers say, in a sentence or a few.
        advice: what to do about it; empty: nothing.
        charts: SVG, made by `tocsin.console.charts`.
        parts: further sections under this one, as each issue is.
    """

    key: str
    title: str
    finding: str
    advice: str = ""
    status: Status = "plain"
    figures: Sequence[Figure] = ()
    charts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    paragraphs: Sequence[Paragraph] = ()
    parts: Sequence[Section] = ()


def not_captured(key: str, title: str, what: str, how: str) -> Section:
    """A section without data: what was not captured, and how to capture it."""
    return Section(key=key, title=title, finding=what, advice=how, status="not_captured")


def numbered(*columns: str) -> frozenset[int]:
    """The places of columns of numbers: all but the first."""
    return frozenset(range(1, len(columns)))
