"""A distribution over the steps: ribbons between quantiles around the median. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.console.charts.decimation import group_starts, kept_points
from tocsin.console.charts.line_chart import nothing
from tocsin.console.charts.marks import Mark
from tocsin.console.charts.markup import element, finite_stretches, path_points, titled
from tocsin.console.charts.numbers import Floats, tick_texts, value_text
from tocsin.console.charts.plot import Options, Plot, margin, range_fact, with_limit
from tocsin.console.charts.scale import Scale, along, fitted, ticks
from tocsin.console.charts.stacked_chart import area_path

RIBBONS: Final = (("min", "max", "range"), ("p05", "p95", "wide"), ("p25", "p75", "narrow"))
"""Lower and upper edge of each ribbon, the outermost first, and the class it is drawn with."""

MEDIAN: Final = "p50"


def ribbon_chart(
    x: npt.ArrayLike,
    quantiles: Mapping[str, npt.ArrayLike],
    *,
    title: str,
    description: str = "",
    unit: str | None = None,
    x_name: str = "step",
    x_unit: str | None = None,
    marks: Sequence[Mark] = (),
    limit: float | None = None,
    logarithmic: bool | None = None,
    width: float = 640,
    height: float = 240,
    heading: bool = True,
) -> str:
    """Ribbons of the `quantiles` that are there (`min p05 p25 p50 p75 p95 max`, float64[n] each).

    Where points are thinned, a ribbon is as wide as the widest of its neighbours.

    Raises:
        ValueError: one of them has not as many values as there are places.
    """
    places = np.asarray(x, np.float64)
    given = {name: np.asarray(values, np.float64) for name, values in quantiles.items()}
    for name, values in given.items():
        if values.shape != places.shape:
            raise ValueError(f"{name}: {values.shape} values, but {places.shape} places")
    ribbons = [(a, b, kind) for a, b, kind in RIBBONS if a in given and b in given]
    options = Options(
        title=title, description=description, unit=unit, x_name=x_name, x_unit=x_unit,
        marks=marks, limit=limit, width=width, height=height, heading=heading,
    )  # fmt: skip
    legend = [(f"{a} to {b}", f"ribbon {kind}") for a, b, kind in ribbons]
    legend += [("median", "line s0")] if MEDIAN in given else []
    plot = Plot(options, legend)
    inside = plot.field
    used = [given[name] for a, b, _ in ribbons for name in (a, b)]
    used += [given[MEDIAN]] if MEDIAN in given else []
    every = np.concatenate(used) if used else np.empty(0)
    y = fitted(
        with_limit(every, limit), start=inside.bottom, end=inside.top,
        logarithmic=logarithmic, unit=unit,
    )  # fmt: skip
    plot.left = margin(tick_texts(ticks(y, 5, unit=unit), unit))
    inside = plot.field
    low, high = (float(places[0]), float(places[-1])) if len(places) else (0.0, 1.0)
    across = along(low, high, start=inside.left, end=inside.right)
    plot.axes(across, y)
    if not len(places) or not np.isfinite(every).any():
        plot.drawn.append(nothing(plot))
        return plot.render(across, kind="ribbon-chart", facts=["No values"])
    groups = max(int(inside.right - inside.left) // 2, 1)
    for a, b, kind in ribbons:
        d = _ribbon(places, given[a], given[b], across, y, groups)
        plot.drawn.append(element("path", titled(f"{a} to {b}"), d=d, class_=f"ribbon {kind}"))
    facts = []
    if MEDIAN in given:
        median = given[MEDIAN]
        plot.gaps("median", places, median, across)
        kept = kept_points(median, groups)
        d = path_points(across.at(places[kept]), y.at(median[kept]))
        plot.drawn.append(element("path", titled("median"), d=d, class_="line s0"))
        facts.append(range_fact("median", places, median, options))
    for a, b, _ in ribbons:
        if np.isfinite(given[a]).any() and np.isfinite(given[b]).any():
            lowest, highest = np.nanmin(given[a]), np.nanmax(given[b])
            ends = (value_text(float(end), unit) for end in (lowest, highest))
            facts.append(f"{a} to {b}: between " + " and ".join(ends))
    plot.limit(y)
    return plot.render(across, kind="ribbon-chart", facts=facts)


def _ribbon(
    places: Floats, low: Floats, high: Floats, across: Scale, up: Scale, groups: int
) -> str:
    """Its outline, in pieces where one of its edges is not finite."""
    low, high = (np.where(np.isfinite(edge), edge, np.nan) for edge in (low, high))
    starts = group_starts(len(places), groups)
    x = across.at(places[starts])
    # Neighbours with and without values: the ribbon is drawn for those that have some.
    lower, upper = up.at(np.fmin.reduceat(low, starts)), up.at(np.fmax.reduceat(high, starts))
    if len(starts) == 1:
        x = np.array([across.start, across.end])
        lower, upper = np.repeat(lower, 2), np.repeat(upper, 2)
    pieces = finite_stretches(np.isfinite(lower) & np.isfinite(upper))
    return "".join(area_path(x[a:b], lower[a:b], upper[a:b]) for a, b in pieces)
