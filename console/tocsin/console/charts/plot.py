"""The field of a chart: its axes, grid, legend, limit and marks, around what a kind draws. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.console.charts.marks import Mark, drawn_marks, mark_texts
from tocsin.console.charts.markup import (
    element,
    finite_stretches,
    image,
    joined,
    shortened,
    text_width,
    titled,
    words,
)
from tocsin.console.charts.numbers import Floats, tick_texts, value_text
from tocsin.console.charts.scale import Scale, ticks

COLOURS: Final = 8
"""Lines and areas have one of so many colours, and lines each their dashes too."""

_TITLE: Final = 28.0
_LEGEND: Final = 18.0
_MARKS: Final = 16.0
_FOOT: Final = 22.0
_SQUEEZED: Final = 4.0
"""A limit further away than so many times the range of the data is written, not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What all charts with axes have.

    Attributes:
        title: what is shown, above the field and for screen readers.
        description: what to see in it, in a sentence, for screen readers; facts of the data
            (range, marks) are added to it.
        unit: of the values: `s`, `bytes`, `bytes/s` and `percent` are written in suitable sizes.
        x_name: what the horizontal axis counts.
        x_unit: its unit; `s` for times since the beginning.
        heading: whether the title is drawn; it is always there for screen readers.
    """

    title: str
    description: str = ""
    unit: str | None = None
    x_name: str = "step"
    x_unit: str | None = None
    marks: Sequence[Mark] = ()
    limit: float | None = None
    limit_name: str = "limit"
    width: float = 640
    height: float = 240
    heading: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The rectangle in which data is drawn, in units of the picture."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(slots=True)
class Plot:
    """A picture in the making: a kind of chart adds what it draws to `drawn`, then renders it."""

    options: Options
    legend: Sequence[tuple[str, str]] = ()
    """Names and the classes of their samples: `line s0`, `area s1`."""
    left: float = 48.0
    right: float = 14.0
    drawn: list[str] = field(default_factory=list)
    above: float = 0.0
    """Room above the field, beside that of title, legend and marks."""
    _rows: list[list[tuple[float, str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = _legend_rows(self.legend, self.options.width - 24)

    @property
    def field(self) -> Field:
        """Where the data goes."""
        options = self.options
        top = _TITLE if options.heading else 8.0
        top += self.above + _LEGEND * len(self._rows) + (_MARKS if options.marks else 0.0)
        return Field(
            left=self.left,
            right=options.width - self.right,
            top=top,
            bottom=max(options.height - _FOOT, top + 20),
        )

    def axes(self, x: Scale, y: Scale, *, whole: bool | None = None) -> None:
        """Draw the grid and the texts of both axes. To be called before data is drawn."""
        self.side_axis(y)
        self.bottom_axis(x, whole=self.options.x_name == "step" if whole is None else whole)

    def side_axis(self, y: Scale) -> None:
        """Draw the grid and the texts of the vertical axis alone."""
        inside, options = self.field, self.options
        count = max(int((inside.bottom - inside.top) / 40), 3)
        values = ticks(y, count, unit=options.unit)
        for value, text in zip(values, tick_texts(values, options.unit), strict=True):
            at = y.place(value)
            self.drawn.append(
                element("line", x1=inside.left, x2=inside.right, y1=at, y2=at, class_="grid")
            )
            self.drawn.append(
                element("text", words(text), x=inside.left - 6, y=at + 4, class_="tick y")
            )

    def bottom_axis(self, x: Scale, *, whole: bool = False) -> None:
        """Draw the horizontal axis alone."""
        inside, options = self.field, self.options
        count = max(int((inside.right - inside.left) / 90), 2)
        values = ticks(x, count, unit=options.x_unit, whole=whole)
        last = -1e9
        name = shortened(options.x_name, 120)
        end = inside.right - text_width(name)
        texts = tick_texts(values, options.x_unit, whole=whole)
        for value, text in zip(values, texts, strict=True):
            at, half = x.place(value), text_width(text) / 2
            anchored = min(max(at, half + 2), options.width - half - 2)
            self.drawn.append(
                element("line", x1=at, x2=at, y1=inside.bottom, y2=inside.bottom + 4, class_="axis")
            )
            if anchored - half < last + 6 or anchored + half > end - 6:
                continue
            last = anchored + half
            self.drawn.append(
                element("text", words(text), x=anchored, y=inside.bottom + 16, class_="tick x")
            )
        self.drawn.append(
            element("text", words(name), x=inside.right, y=inside.bottom + 16, class_="name x")
        )
        self.drawn.append(
            element(
                "line", x1=inside.left, x2=inside.right, y1=inside.bottom, y2=inside.bottom,
                class_="axis",
            )
        )  # fmt: skip

    def gaps(self, name: str, x: Floats, y: Floats, across: Scale) -> list[tuple[float, float]]:
        """Shade where values are NaN or infinite; returns the first and last place of each. Those
        that touch in the picture are shaded as one.
        """
        inside = self.field
        found = []
        shaded: list[tuple[float, float, int, int, int]] = []
        for start, stop in finite_stretches(~np.isfinite(y)):
            first, last = float(x[start]), float(x[stop - 1])
            found.append((first, last))
            a, b = across.place(first), across.place(last)
            # At least as wide as it takes to be seen.
            a, b = max(min(a, (a + b) / 2 - 1.5), 0), max(b, (a + b) / 2 + 1.5)
            count = 1
            if shaded and a <= shaded[-1][1]:
                a, _, start, _, count = shaded.pop()
                count += 1
            shaded.append((a, b, start, stop, count))
        for a, b, start, stop, count in shaded:
            where = value_text(float(x[start]), digits=12)
            if stop - start > 1:
                where += f" to {value_text(float(x[stop - 1]), digits=12)}"
            if count > 1:
                where += f", in {count:,} places"
            kind = "NaN" if np.isnan(y[start]) else "infinite"
            self.drawn.append(
                element(
                    "g",
                    titled(f"{name} is not finite at {self.options.x_name} {where}"),
                    element(
                        "rect", x=a, y=inside.top, width=b - a,
                        height=inside.bottom - inside.top, class_="gap",
                    ),
                    element(
                        "text", kind, x=(a + b) / 2, y=inside.bottom - 6, class_="gap-name"
                    ) if b - a > 30 else _cross((a + b) / 2, inside.bottom - 7),
                )
            )  # fmt: skip
        return found

    def limit(self, y: Scale) -> None:
        """Draw the limit of the options as a dashed line, or tell it where it is outside."""
        value = self.options.limit
        if value is None:
            return
        inside, unit = self.field, self.options.unit
        text = f"{self.options.limit_name} {value_text(value, unit)}"
        if y.inside(value):
            at = y.place(value)
            self.drawn.append(
                element("line", x1=inside.left, x2=inside.right, y1=at, y2=at, class_="limit")
            )
            # Above the line, unless that is outside of the field.
            text_at = at - 4 if at - 16 > inside.top else at + 13
        else:
            above = value > y.high
            text += " ↑" if above else " ↓"
            text_at = inside.top + 12 if above else inside.bottom - 6
        self.drawn.append(
            element("text", words(text), x=inside.right - 2, y=text_at, class_="limit-name")
        )

    def render(self, x: Scale | None, *, kind: str, facts: Sequence[str] = ()) -> str:
        """The whole picture. `x` is the scale of the marks."""
        options, inside = self.options, self.field
        head = []
        if options.heading:
            head.append(
                element(
                    "text", words(shortened(options.title, options.width - 12, 13)),
                    x=4, y=14, class_="heading",
                )
            )  # fmt: skip
        y = (_TITLE if options.heading else 8.0) + 9
        for row in self._rows:
            at = inside.left if self.left < 100 else 4.0
            for width, name, sample in row:
                head.append(_sample(sample, at, y))
                head.append(element("text", words(name), x=at + 24, y=y + 1, class_="legend"))
                at += width
            y += _LEGEND
        marks = ""
        if x is not None and options.marks:
            marks = drawn_marks(options.marks, x, inside.top - 7, inside.bottom)
        marks_text = mark_texts(options.marks, options.x_name) if x is not None else ""
        return image(
            *head, *self.drawn, marks,
            width=options.width, height=options.height, title=options.title, kind=kind,
            description=joined([options.description.rstrip("."), *facts, marks_text]),
        )  # fmt: skip


def margin(texts: Sequence[str]) -> float:
    """The room that texts at the left of the field take."""
    return max((text_width(text) for text in texts), default=0.0) + 14


def with_limit(values: Floats, limit: float | None) -> Floats:
    """The numbers that a vertical axis is to hold: with the limit, unless it would squeeze them."""
    shown = values[np.isfinite(values)]
    if limit is None or not np.isfinite(limit):
        return shown
    if not len(shown):
        return np.array([limit])
    low, high = float(shown.min()), float(shown.max())
    spread = max(high - min(low, 0.0), abs(high) * 0.1)
    far = limit > high + _SQUEEZED * spread or limit < low - _SQUEEZED * spread
    return shown if far else np.append(shown, limit)


def range_fact(name: str, x: Floats, y: Floats, options: Options) -> str:
    """A line in words: how many points, from where to where, first, last, lowest, highest."""
    shown = np.flatnonzero(np.isfinite(y))
    if not len(shown):
        return f"{name}: no finite value"
    first, last = (value_text(float(y[i]), options.unit) for i in (shown[0], shown[-1]))
    low, high = (value_text(float(v), options.unit) for v in (y[shown].min(), y[shown].max()))
    where = " to ".join(value_text(float(v), options.x_unit, digits=12) for v in (x[0], x[-1]))
    return (
        f"{name}: {len(y):,} points, {options.x_name} {where}; first {first}, last {last}, "
        f"lowest {low}, highest {high}"
    )


def _legend_rows(
    entries: Sequence[tuple[str, str]], width: float
) -> list[list[tuple[float, str, str]]]:
    rows: list[list[tuple[float, str, str]]] = []
    used = width
    for name, sample in entries:
        shown = shortened(name, 280)
        wide = text_width(shown) + 44
        if used + wide > width:
            rows.append([])
            used = 0.0
        rows[-1].append((wide, shown, sample))
        used += wide
    return rows


def _sample(sample: str, x: float, y: float) -> str:
    if sample.startswith("line"):
        return element("line", x1=x, x2=x + 20, y1=y - 3, y2=y - 3, class_=sample)
    return element("rect", x=x + 4, y=y - 9, width=12, height=12, class_=sample)


def _cross(x: float, y: float) -> str:
    arms = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
    return element("path", d=arms, class_="cross")
