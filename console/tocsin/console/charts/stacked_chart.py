"""Parts of a whole over steps or time, as areas on top of one another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tocsin.console.charts.decimation import group_starts
from tocsin.console.charts.line_chart import Line, nothing
from tocsin.console.charts.marks import Mark
from tocsin.console.charts.markup import coordinate, element, path_points, titled
from tocsin.console.charts.numbers import Floats, tick_texts, value_text
from tocsin.console.charts.plot import COLOURS, Options, Plot, margin
from tocsin.console.charts.scale import along, fitted, ticks

_LARGEST: Final = 1e280
"""Larger numbers have no place in a picture: the sum of all may be no float."""

_WINDOW_WIDTH: Final = 12.0
_WINDOW_PLACES: Final = 16
_MIN_WINDOWS: Final = 16
"""So wide is a window at least, and of so many places, unless there are fewer windows than that:
single short steps differ by chance, and side by side they look like a comb."""

_ROOM: Final = 4.0
"""Sums of more than so many times the highest mean leave the picture at its top, so that the areas
stay to be seen."""


def stacked_chart(
    parts: Sequence[Line],
    *,
    title: str,
    description: str = "",
    unit: str | None = None,
    x_name: str = "step",
    x_unit: str | None = None,
    marks: Sequence[Mark] = (),
    width: float = 640,
    height: float = 240,
    heading: bool = True,
) -> str:
    """Areas, the first part lowest; all parts have the same places. What is not finite counts
    as 0.

    Neighbours are put together: areas are means, and a line above them is the highest sum of the
    neighbours, so that no spike is lost; far ones end at the top of the picture.

    Raises:
        ValueError: the parts have not the same places.
    """
    if any(not np.array_equal(part.x, parts[0].x) for part in parts):
        raise ValueError("the parts of a stacked chart have the same places")
    options = Options(
        title=title, description=description, unit=unit, x_name=x_name, x_unit=x_unit,
        marks=marks, width=width, height=height, heading=heading,
    )  # fmt: skip
    plot = Plot(options, [(part.name, f"area s{i % COLOURS}") for i, part in enumerate(parts)])
    places = parts[0].x if parts else np.empty(0)
    values = np.array([np.where(np.abs(p.y) < _LARGEST, np.maximum(p.y, 0), 0) for p in parts])
    sums: Floats = values.sum(axis=0) if len(places) else np.empty(0)
    inside = plot.field
    starts = group_starts(len(places), _windows(len(places), inside.right - inside.left))
    sizes = np.diff(np.append(starts, len(places)))
    means = np.add.reduceat(values, starts, axis=1) / sizes if len(places) else values
    highest = _ROOM * float(means.sum(axis=0).max()) if len(places) else 0.0
    shown = np.minimum(sums, highest)
    y = fitted(shown, start=inside.bottom, end=inside.top, unit=unit, from_zero=True)
    plot.left = margin(tick_texts(ticks(y, 5, unit=unit), unit))
    inside = plot.field
    low, high = (float(places[0]), float(places[-1])) if len(places) else (0.0, 1.0)
    x = along(low, high, start=inside.left, end=inside.right)
    plot.axes(x, y)
    if not len(places):
        plot.drawn.append(nothing(plot))
        return plot.render(x, kind="stacked-chart", facts=["No values"])
    across = x.at(places[starts])
    edges = np.vstack([np.zeros(len(starts)), np.cumsum(means, axis=0)])
    if len(starts) == 1:
        # One step is as wide as the field.
        across, edges = np.array([inside.left, inside.right]), np.repeat(edges, 2, axis=1)
    elif len(starts) < len(places):
        across, edges = np.append(across, inside.right), np.hstack([edges, edges[:, -1:]])
    for i, part in enumerate(parts):
        d = area_path(across, y.at(edges[i]), y.at(edges[i + 1]))
        plot.drawn.append(element("path", titled(part.name), d=d, class_=f"area s{i % COLOURS}"))
    facts = [f"{len(places):,} points, highest sum {value_text(float(sums.max()), unit)}"]
    if len(starts) < len(places):
        peaks = y.at(np.maximum.reduceat(shown, starts))
        title = f"highest sum of {int(sizes.max()):,} neighbours"
        line = path_points(x.at(places[starts]), peaks)
        plot.drawn.append(
            element(
                "path",
                titled(title),
                d=line,
                class_="line peak",
            )
        )
        facts.append(f"Areas are means of {int(sizes.max()):,} neighbours, the line their highest")
    total = float(values.sum()) or 1.0
    shares = (f"{p.name} {100 * v.sum() / total:.3g} %" for p, v in zip(parts, values, strict=True))
    facts.append(f"Shares of the sum: {', '.join(shares)}")
    return plot.render(x, kind="stacked-chart", facts=facts)


def _windows(count: int, width: float) -> int:
    """How many windows so many places are put together to."""
    return max(min(int(width / _WINDOW_WIDTH), count // _WINDOW_PLACES), _MIN_WINDOWS)


def area_path(x: Floats, low: Floats, high: Floats) -> str:
    """The outline of what is between two lines: along the one, and back along the other."""
    there = [f"{coordinate(a)} {coordinate(b)}" for a, b in zip(x, high, strict=True)]
    back = [f"{coordinate(a)} {coordinate(b)}" for a, b in zip(x[::-1], low[::-1], strict=True)]
    return f"M{there[0]}L{' '.join([*there[1:], *back])}z"
