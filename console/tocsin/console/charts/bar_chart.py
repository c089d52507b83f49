"""Bars beside names, one bar of parts, and boxes of quantiles: numbers to compare. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Required, TypedDict, Unpack

import numpy as np

from tocsin.console.charts.markup import element, shortened, text_width, titled, words
from tocsin.console.charts.numbers import value_text
from tocsin.console.charts.plot import COLOURS, Options, Plot
from tocsin.console.charts.scale import Scale, fitted
from tocsin.schemas.records.issues import Severity
from tocsin.schemas.text import share_text

_ROW: Final = 22.0
_BAR: Final = 14.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A named number. `severity` colours it as an issue; `text` is shown instead of the number."""

    name: str
    value: float
    severity: Severity | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """How values are distributed: half of them are between `p25` and `p75`, nine of ten between
    `p05` and `p95`.
    """

    name: str
    p05: float
    p25: float
    p50: float
    p75: float
    p95: float


class RowOptions(TypedDict, total=False):
    """What charts with a row for each name have; see `Options`."""

    title: Required[str]
    description: str
    unit: str | None
    limit: float | None
    limit_name: str
    width: float
    heading: bool


def bar_chart(bars: Sequence[Bar], **given: Unpack[RowOptions]) -> str:
    """A bar for each, in the given order, its name at the left and its number at its end."""
    plot = _rows([bar.name for bar in bars], Options(**given))
    unit, limit = plot.options.unit, plot.options.limit
    texts = [bar.text if bar.text is not None else value_text(bar.value, unit) for bar in bars]
    plot.right = max((text_width(text) for text in texts), default=0.0) + 14
    inside = plot.field
    values = np.array([bar.value for bar in bars] + ([limit] if limit is not None else []))
    x = fitted(values, start=inside.left, end=inside.right, unit=unit, from_zero=True)
    for i, (bar, text) in enumerate(zip(bars, texts, strict=True)):
        y = inside.top + i * _ROW
        _name(plot, bar.name, y)
        zero = x.place(0.0) if x.inside(0.0) else inside.left
        end = x.place(bar.value) if math.isfinite(bar.value) else zero
        plot.drawn.append(
            element(
                "rect", titled(f"{bar.name}: {text}"), x=min(zero, end), y=y + 3,
                width=max(abs(end - zero), 0.8), height=_BAR, class_=f"bar {bar.severity or 's0'}",
            )
        )  # fmt: skip
        plot.drawn.append(
            element("text", words(text), x=max(end, zero) + 5, y=y + 14, class_="value")
        )
    _limit_line(plot, x, len(bars))
    facts = [f"{b.name}: {text}" for b, text in zip(bars[:20], texts, strict=False)]
    return plot.render(None, kind="bar-chart", facts=["; ".join(facts)] if facts else ["No values"])


def share_bar(
    parts: Sequence[Bar],
    *,
    title: str,
    description: str = "",
    unit: str | None = None,
    width: float = 640,
    heading: bool = True,
) -> str:
    """One bar of all parts, with their shares: what a pie is for, and easier to compare.

    Parts that are not above zero are left out.
    """
    shown = [part for part in parts if part.value > 0 and math.isfinite(part.value)]
    total = sum(part.value for part in shown)
    named = [
        (f"{p.name} {share_text(100 * p.value / total)} % ({value_text(p.value, unit)})", p)
        for p in shown
    ]
    options = Options(
        title=title, description=description, unit=unit, width=width, height=0, heading=heading
    )
    legend = [(name, f"area s{i % COLOURS}") for i, (name, _) in enumerate(named)]
    plot = Plot(options, legend, left=4.0, right=4.0)
    top = plot.field.top
    plot.options = Options(
        title=title, description=description, unit=unit, width=width, height=top + 50,
        heading=heading,
    )  # fmt: skip
    at, room = 4.0, width - 8
    for i, (name, part) in enumerate(named):
        wide = room * part.value / total
        plot.drawn.append(
            element(
                "rect", titled(name), x=at, y=top + 6, width=max(wide, 0.8), height=28,
                class_=f"area s{i % COLOURS}",
            )
        )  # fmt: skip
        at += wide
    facts = [", ".join(name for name, _ in named)] if named else ["No values"]
    return plot.render(None, kind="share-bar", facts=facts)


def box_chart(boxes: Sequence[Box], **given: Unpack[RowOptions]) -> str:
    """A box for each from p25 to p75 with its median, and whiskers from p05 to p95."""
    options = Options(**given, x_name="", x_unit=given.get("unit"))
    plot = _rows([box.name for box in boxes], options, axis=18)
    unit, limit, inside = options.unit, options.limit, plot.field
    numbers = [v for b in boxes for v in (b.p05, b.p25, b.p50, b.p75, b.p95)]
    values = np.array([*numbers, *([limit] if limit is not None else [])], np.float64)
    x = fitted(values, start=inside.left, end=inside.right, unit=unit)
    plot.bottom_axis(x)
    facts = []
    for i, box in enumerate(boxes):
        y = inside.top + i * _ROW
        _name(plot, box.name, y)
        quantiles = ", ".join(
            f"{name} {value_text(value, unit)}"
            for name, value in (
                ("p5", box.p05), ("p25", box.p25), ("median", box.p50), ("p75", box.p75),
                ("p95", box.p95),
            )
        )  # fmt: skip
        facts.append(f"{box.name}: {quantiles}")
        places = [x.place(v) for v in (box.p05, box.p25, box.p50, box.p75, box.p95)]
        if not all(map(math.isfinite, places)):
            continue
        low, q25, middle, q75, high = places
        whiskers = f"M{low:.1f} {y + 10:.1f}H{high:.1f}"
        whiskers += "".join(f"M{end:.1f} {y + 6:.1f}v8" for end in (low, high))
        plot.drawn.append(
            element(
                "g",
                titled(facts[-1]),
                element("path", d=whiskers, class_="whisker"),
                element(
                    "rect", x=q25, y=y + 3, width=max(q75 - q25, 1), height=_BAR, class_="box s0"
                ),
                element("path", d=f"M{middle:.1f} {y + 3:.1f}v{_BAR:.0f}", class_="median"),
            )
        )  # fmt: skip
    _limit_line(plot, x, len(boxes))
    return plot.render(None, kind="box-chart", facts=facts[:20] or ["No values"])


def _rows(names: Sequence[str], options: Options, *, axis: float = 0) -> Plot:
    """A plot with a row for each name, and its height; `axis`: that of an axis below them."""
    around = (22 if options.heading else 8) + 22 + (6 if options.limit is not None else 0) - 8
    plot = Plot(replace(options, height=len(names) * _ROW + around + axis))
    widest = max((text_width(name) for name in names), default=0.0)
    plot.left = min(widest, options.width * 0.4) + 12
    return plot


def _name(plot: Plot, name: str, y: float) -> None:
    left = plot.field.left
    shown = shortened(name, left - 10)
    plot.drawn.append(
        element("text", titled(name), words(shown), x=left - 6, y=y + 14, class_="row")
    )


def _limit_line(plot: Plot, x: Scale, count: int) -> None:
    value = plot.options.limit
    if value is None or not x.inside(value):
        return
    at, inside = x.place(value), plot.field
    bottom = inside.top + count * _ROW
    text = f"{plot.options.limit_name} {value_text(value, plot.options.unit)}"
    anchor = "limit-name" if at > (inside.left + inside.right) / 2 else "limit-name start"
    plot.drawn.append(element("line", x1=at, x2=at, y1=inside.top, y2=bottom + 4, class_="limit"))
    shift = -4 if anchor == "limit-name" else 4
    plot.drawn.append(element("text", words(text), x=at + shift, y=bottom + 6, class_=anchor))
