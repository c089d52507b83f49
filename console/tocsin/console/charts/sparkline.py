"""A line as small as a word. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tocsin.console.charts.decimation import kept_points
from tocsin.console.charts.markup import element, finite_stretches, image, joined, path_points
from tocsin.console.charts.numbers import value_text
from tocsin.console.charts.scale import along, fitted


def sparkline(
    values: npt.ArrayLike,
    *,
    title: str,
    unit: str | None = None,
    width: float = 120,
    height: float = 28,
) -> str:
    """The values, float64[n], side by side; a dot at the last one, and NaN shaded."""
    y = np.asarray(values, np.float64)
    kept = kept_points(y, max(int(width) // 2, 1))
    across = along(0, max(len(y) - 1, 1), start=3, end=width - 4)
    up = fitted(y, start=height - 3, end=3)
    if not up.logarithmic and np.isfinite(y).any():
        # No round ends: it has no axis, and little height.
        low, high = float(np.nanmin(y[np.isfinite(y)])), float(np.nanmax(y[np.isfinite(y)]))
        up = along(low, high, start=height - 3, end=3)
    drawn = []
    for start, stop in finite_stretches(~np.isfinite(y)):
        a, b = across.place(start), across.place(stop - 1)
        drawn.append(element("rect", x=a - 1, y=0, width=b - a + 2, height=height, class_="gap"))
    places, heights = across.at(kept.astype(np.float64)), up.at(y[kept])
    drawn.append(element("path", d=path_points(places, heights), class_="line s0"))
    finite = np.flatnonzero(np.isfinite(heights))
    facts = ["No values"]
    if len(finite):
        last = finite[-1]
        drawn.append(element("circle", cx=places[last], cy=heights[last], r=2, class_="end s0"))
        shown = y[np.isfinite(y)]
        texts = [
            value_text(float(v), unit) for v in (shown[0], shown[-1], shown.min(), shown.max())
        ]
        facts = [
            f"{len(y):,} points; first {texts[0]}, last {texts[1]}, lowest {texts[2]}, "
            f"highest {texts[3]}"
        ]
        if len(shown) < len(y):
            facts.append(f"{len(y) - len(shown):,} are not finite")
    return image(
        *drawn, width=width, height=height, title=title, description=joined(facts), kind="spark"
    )
