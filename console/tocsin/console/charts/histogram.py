"""How often values occur. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.console.charts.line_chart import nothing
from tocsin.console.charts.markup import element, titled, words
from tocsin.console.charts.numbers import Floats, tick_texts, value_text
from tocsin.console.charts.plot import Options, Plot, margin
from tocsin.console.charts.scale import LARGEST, LOG_FROM, SMALLEST, Scale, fitted, ticks

_MANY: Final = 100
_FAR: Final = 2.0


def histogram(
    values: npt.ArrayLike,
    *,
    title: str,
    description: str = "",
    unit: str | None = None,
    name: str = "values",
    bins: int = 40,
    quantiles: Sequence[float] = (0.5, 0.95),
    width: float = 640,
    height: float = 200,
    heading: bool = True,
) -> str:
    """Bars of equal width, in logarithms where the values are above zero and far apart.

    Args:
        values: float64[n]; what is not finite is counted in the description.
        name: what is counted: `steps`.
        quantiles: shares at which a line is drawn and named.
    """
    every = np.asarray(values, np.float64).ravel()
    shown = every[np.abs(every) < LARGEST]
    options = Options(
        title=title, description=description, x_name="", x_unit=unit, width=width, height=height,
        heading=heading,
    )  # fmt: skip
    plot = Plot(options)
    inside = plot.field
    if not len(shown):
        plot.drawn.append(nothing(plot))
        return plot.render(None, kind="histogram", facts=["No values"])
    most = _most(shown)
    counts, edges, logarithmic = binned(np.minimum(shown, most), bins)
    above = int((shown > most).sum())
    y = fitted(counts.astype(np.float64), start=inside.bottom, end=inside.top, from_zero=True)
    marks = [tick for tick in ticks(y, 4, whole=True) if y.inside(tick)]
    plot.left = margin(tick_texts(marks))
    inside = plot.field
    x = Scale(
        low=float(edges[0]), high=float(edges[-1]), start=inside.left, end=inside.right,
        logarithmic=logarithmic,
    )  # fmt: skip
    plot.axes(x, y, whole=False)
    places = x.at(edges)
    for i, count in enumerate(counts):
        if not count:
            continue
        top = y.place(float(count))
        ends = " to ".join(value_text(float(edge), unit) for edge in edges[i : i + 2])
        if above and i == len(counts) - 1:
            ends = f"{value_text(float(edges[i]), unit)} and more"
        plot.drawn.append(
            element(
                "rect", titled(f"{ends}: {int(count):,} {name}"), x=float(places[i]) + 0.3, y=top,
                width=max(float(places[i + 1] - places[i]) - 0.6, 0.6),
                height=max(inside.bottom - top, 0.8), class_="bar s0",
            )
        )  # fmt: skip
    facts = [f"{len(shown):,} {name}"]
    if above:
        facts.append(f"The last bar has {above:,} above {value_text(most, unit)} too")
    if len(every) > len(shown):
        facts.append(f"{len(every) - len(shown):,} more are not finite")
    for i, share in enumerate(quantiles):
        value = float(np.quantile(shown, share))
        text = f"{'median' if share == 0.5 else f'p{100 * share:g}'} {value_text(value, unit)}"
        facts.append(text)
        at = x.place(value)
        anchor = "limit-name" if at > (inside.left + inside.right) / 2 else "limit-name start"
        plot.drawn.append(
            element("line", x1=at, x2=at, y1=inside.top, y2=inside.bottom, class_="quantile")
        )
        plot.drawn.append(
            element(
                "text", words(text), x=at + (-4 if anchor == "limit-name" else 4),
                y=inside.top + 10 + 14 * i, class_=anchor,
            )
        )  # fmt: skip
    return plot.render(None, kind="histogram", facts=facts)


def _most(values: Floats) -> float:
    """Where a few far outliers would squeeze all others into some bars: what is above goes into the
    last one."""
    high = float(values.max())
    if float(values.min()) <= 0 or high <= 0 or len(values) < _MANY:
        return high
    nearly = float(np.quantile(values, 0.99))
    return 1.25 * nearly if high > _FAR * nearly else high


def binned(values: Floats, bins: int) -> tuple[npt.NDArray[np.int64], Floats, bool]:
    """Counts int64[bins], edges float64[bins + 1], and whether the edges are logarithmic.

    `values` are finite, and there is one at least.
    """
    low, high = float(values.min()), float(values.max())
    logarithmic = low > SMALLEST and high / low > LOG_FROM
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        room = abs(high) * 0.05 or 0.5
        low, high = low - room, high + room
    edges = np.geomspace(low, high, bins + 1) if logarithmic else np.linspace(low, high, bins + 1)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return counts.astype(np.int64), edges, logarithmic
