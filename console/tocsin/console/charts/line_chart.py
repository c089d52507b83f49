"""Lines over steps or time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.console.charts.decimation import kept_points
from tocsin.console.charts.marks import Mark
from tocsin.console.charts.markup import element, path_points, titled
from tocsin.console.charts.numbers import Floats, tick_texts, value_text
from tocsin.console.charts.plot import COLOURS, Options, Plot, margin, range_fact, with_limit
from tocsin.console.charts.scale import along, fitted, ticks

DOTTED: Final = 60
"""Up to so many points of a line are each marked by a dot."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A named line: places and values, float64[n] each.

    Attributes:
        missing: a NaN means that there is no value (a sample is absent): the line is interrupted.
            Otherwise the value itself is NaN, which is shaded and told.
    """

    name: str
    x: Floats
    y: Floats
    missing: bool = False

    @classmethod
    def from_values(
        cls, name: str, x: npt.ArrayLike, y: npt.ArrayLike, *, missing: bool = False
    ) -> Line:
        """A line of any numbers. Raises ValueError if there are not as many places as values."""
        xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if xs.shape != ys.shape or xs.ndim != 1:
            raise ValueError(f"{name}: {xs.shape} places, but {ys.shape} values")
        return cls(name, xs, ys, missing)


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    description: str = "",
    unit: str | None = None,
    x_name: str = "step",
    x_unit: str | None = None,
    marks: Sequence[Mark] = (),
    limit: float | None = None,
    limit_name: str = "limit",
    logarithmic: bool | None = None,
    width: float = 640,
    height: float = 240,
    heading: bool = True,
) -> str:
    """Lines, each with its colour and dashes, NaN shaded, issues marked, a limit dashed.

    The vertical axis is logarithmic where all values are above zero and far apart. Points are
    thinned to what the width can show; no spike and no NaN is lost.
    """
    options = Options(
        title=title, description=description, unit=unit, x_name=x_name, x_unit=x_unit,
        marks=marks, limit=limit, limit_name=limit_name, width=width, height=height,
        heading=heading,
    )  # fmt: skip
    shown = [line for line in lines if len(line.x)]
    legend = [(line.name, f"line s{i % COLOURS}") for i, line in enumerate(shown)]
    plot = Plot(options, legend if len(shown) > 1 else ())
    inside = plot.field
    every_y = np.concatenate([line.y for line in shown]) if shown else np.empty(0)
    every_x = np.concatenate([line.x for line in shown]) if shown else np.array([0.0, 1.0])
    y = fitted(
        with_limit(every_y, limit), start=inside.bottom, end=inside.top,
        logarithmic=logarithmic, unit=unit,
    )  # fmt: skip
    plot.left = margin(tick_texts(ticks(y, 5, unit=unit), unit))
    inside = plot.field
    x = along(float(every_x.min()), float(every_x.max()), start=inside.left, end=inside.right)
    plot.bottom_axis(x, whole=x_name == "step")
    if np.isfinite(every_y).any() or limit is not None:
        plot.side_axis(y)
    facts = []
    if not shown:
        plot.drawn.append(nothing(plot))
        facts.append("No values")
    for line in shown:
        if not line.missing and (gone := plot.gaps(line.name, line.x, line.y, x)):
            first = value_text(gone[0][0], digits=12)
            facts.append(f"{line.name} is not finite first at {x_name} {first}")
    for i, line in enumerate(shown):
        kept = kept_points(line.y, max(int(inside.right - inside.left) // 2, 1))
        across, up = x.at(line.x[kept]), y.at(line.y[kept])
        kind = f"line s{i % COLOURS}"
        if len(line.x) <= DOTTED:
            dots = "".join(
                f"M{a:.1f} {b:.1f}h0" for a, b in zip(across, up, strict=True) if np.isfinite(b)
            )
            plot.drawn.append(element("path", d=dots, class_=f"dots s{i % COLOURS}"))
        plot.drawn.append(
            element("path", titled(line.name), d=path_points(across, up), class_=kind)
        )
        facts.append(range_fact(line.name, line.x, line.y, options))
    plot.limit(y)
    return plot.render(x, kind="line-chart", facts=facts[:12])


def nothing(plot: Plot) -> str:
    """What is drawn where there is no value."""
    inside = plot.field
    return element(
        "text", "no values", x=(inside.left + inside.right) / 2,
        y=(inside.top + inside.bottom) / 2, class_="nothing",
    )  # fmt: skip
