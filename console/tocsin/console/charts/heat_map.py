"""Rows by steps as coloured cells: layers, ranks, cores, devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tocsin.console.charts.decimation import group_starts
from tocsin.console.charts.line_chart import nothing
from tocsin.console.charts.marks import Mark
from tocsin.console.charts.markup import coordinate, element, shortened, text_width, titled, words
from tocsin.console.charts.numbers import Floats, value_text
from tocsin.console.charts.plot import Options, Plot
from tocsin.console.charts.scale import LOG_FROM, SMALLEST, along

LEVELS: Final = 16
"""So many colours from the lowest to the highest value."""

MAX_ROWS: Final = 60
"""More rows are put together, neighbours in one."""

Combine = Literal["max", "min", "mean"]

_CELL: Final = 4.0
_SCALE: Final = 18.0
"""The height of the scale of the colours, above the field."""


def heat_map(
    rows: Sequence[str],
    x: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    title: str,
    description: str = "",
    unit: str | None = None,
    x_name: str = "step",
    x_unit: str | None = None,
    marks: Sequence[Mark] = (),
    limits: tuple[float, float] | None = None,
    logarithmic: bool | None = None,
    combine: Combine = "max",
    width: float = 640,
    height: float | None = None,
    heading: bool = True,
) -> str:
    """Cells `values` float64[rows, n] at the places `x` float64[n], coloured from low to high.

    NaN is no value and stays empty; infinite values have a colour of their own. What is too fine
    for the picture is put together, by default as its highest value, so that a spike stays.

    Args:
        limits: the values of the first and of the last colour; None: those of the data.
        logarithmic: None: if all values are above zero and far apart.
        combine: what becomes of neighbours that share a cell.
        height: None: as the number of rows needs it.

    Raises:
        ValueError: the numbers of rows and places are not those of the values.
    """
    places, cells = np.asarray(x, np.float64), np.asarray(values, np.float64)
    if cells.shape != (len(rows), len(places)):
        raise ValueError(f"values {cells.shape}, but {len(rows)} rows and {len(places)} places")
    names, cells = _fewer_rows(rows, cells, combine)
    row_height = min(max(150.0 / max(len(names), 1), 9.0), 24.0)
    options = Options(
        title=title, description=description, unit=unit, x_name=x_name, x_unit=x_unit, marks=marks,
        width=width, heading=heading,
        height=height or row_height * max(len(names), 1) + 52 + _SCALE + (16 if marks else 0),
    )  # fmt: skip
    plot = Plot(options)
    labels = distinct(names, width * 0.34)
    label_width = max((text_width(label, 11) for label in labels), default=0.0)
    plot.left = label_width + 12
    plot.above = _SCALE
    inside = plot.field
    low, high = (float(places[0]), float(places[-1])) if len(places) else (0.0, 1.0)
    across = along(low, high, start=inside.left, end=inside.right)
    if not names or not np.isfinite(cells).any():
        plot.bottom_axis(across, whole=x_name == "step")
        plot.drawn.append(nothing(plot))
        return plot.render(across, kind="heat-map", facts=["No values"])
    edges, cells = _columns(places, cells, across.start, across.end, combine)
    colours = _Colours.for_cells(cells, limits, logarithmic)
    up = (inside.bottom - inside.top) / len(names)
    plot.drawn.append(_cell_paths(colours.levels(cells), edges, inside.top, up))
    every = max(1, -(-11 // max(int(up), 1)))
    for i, name in enumerate(names):
        at = inside.top + (i + 0.5) * up + 4
        # Those that have no room are there for who clicks on a row, and not drawn.
        hidden = None if i % every == 0 else "hidden"
        plot.drawn.append(
            element(
                "text", titled(name), words(labels[i]), x=inside.left - 6, y=at, class_="row",
                visibility=hidden,
            )
        )  # fmt: skip
    plot.bottom_axis(across, whole=x_name == "step")
    plot.drawn.append(colours.scale(inside.left, inside.top - (16 if marks else 0) - 16, unit))
    worst = int(np.nanargmax(np.where(np.isinf(cells), np.nan, cells))) // cells.shape[1]
    facts = [
        f"{len(rows):,} rows, {len(places):,} places; from {value_text(colours.low, unit)} to "
        f"{value_text(colours.high, unit)}",
        f"Highest in {names[worst]}",
    ]
    return plot.render(across, kind="heat-map", facts=facts)


class _Colours:
    """Which of the colours a value has."""

    def __init__(self, low: float, high: float, logarithmic: bool) -> None:
        self.low, self.high, self.logarithmic = low, high, logarithmic

    @classmethod
    def for_cells(
        cls, cells: Floats, limits: tuple[float, float] | None, logarithmic: bool | None
    ) -> _Colours:
        shown = cells[np.isfinite(cells)]
        low, high = limits if limits is not None else (float(shown.min()), float(shown.max()))
        if logarithmic is None:
            logarithmic = low > SMALLEST and high / low > LOG_FROM
        elif logarithmic and low <= 0:
            positive = shown[shown > 0]
            low = float(positive.min()) if len(positive) else 1.0
            high = max(high, low)
        return cls(low, high, logarithmic)

    def levels(self, cells: Floats) -> npt.NDArray[np.int64]:
        """0 to LEVELS - 1; -1 where there is no value, LEVELS where it is infinite."""
        low, high, given = self.low, self.high, cells
        if self.logarithmic:
            given = np.log(np.maximum(cells, low))
            low, high = np.log(low), np.log(high)
        # Halves: the difference of two numbers may be more than a number can be.
        spread, above = high / 2 - low / 2, given / 2 - low / 2
        share = above / spread if spread > 0 else np.where(np.isfinite(given), 0.5, given)
        finite = np.isfinite(cells)
        level: npt.NDArray[np.int64] = np.clip(
            np.where(finite, share, 0) * LEVELS, 0, LEVELS - 1
        ).astype(np.int64)
        level[np.isnan(cells)] = -1
        level[np.isinf(cells)] = LEVELS
        return level

    def scale(self, x: float, y: float, unit: str | None) -> str:
        """The colours side by side, between the lowest and the highest value."""
        low = value_text(self.low, unit)
        start = x + text_width(low, 11) + 6
        boxes = [
            element("rect", x=start + i * 8, y=y, width=8.4, height=10, class_=f"h{i}")
            for i in range(LEVELS)
        ]
        high = value_text(self.high, unit) + (", logarithmic" if self.logarithmic else "")
        return element(
            "g",
            element("text", words(low), x=x, y=y + 9, class_="legend"),
            *boxes,
            element("text", words(high), x=start + LEVELS * 8 + 6, y=y + 9, class_="legend"),
        )


def _fewer_rows(
    rows: Sequence[str], cells: Floats, combine: Combine
) -> tuple[Sequence[str], Floats]:
    if len(rows) <= MAX_ROWS:
        return rows, cells
    starts = group_starts(len(rows), MAX_ROWS)
    ends = [*starts[1:], len(rows)]
    names = [
        rows[a] if b - a == 1 else f"{rows[a]} … {rows[b - 1]}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return names, _combined(cells, starts, 0, combine)


def _columns(
    places: Floats, cells: Floats, start: float, end: float, combine: Combine
) -> tuple[Floats, Floats]:
    """The edges of the columns in the picture, float64[columns + 1], and their cells."""
    starts = group_starts(len(places), max(int((end - start) / _CELL), 1))
    cells = _combined(cells, starts, 1, combine)
    first = places[starts]
    low, high = float(places[0]), float(places[-1])
    if high <= low:
        return np.array([start, end]), cells
    # A cell reaches to the next one; the last is as wide as the one before it.
    last = high + (float(first[-1] - first[-2]) if len(first) > 1 else high - low)
    edges = np.append(first, last)
    return start + (edges - edges[0]) / (edges[-1] - edges[0]) * (end - start), cells


def _combined(cells: Floats, starts: npt.NDArray[np.int64], axis: int, combine: Combine) -> Floats:
    if combine == "mean":
        finite = np.isfinite(cells)
        total = np.add.reduceat(np.where(finite, cells, 0), starts, axis=axis)
        count = np.add.reduceat(finite.astype(np.float64), starts, axis=axis)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)
    reduce = np.fmax if combine == "max" else np.fmin
    return np.asarray(reduce.reduceat(cells, starts, axis=axis), np.float64)


def _cell_paths(levels: npt.NDArray[np.int64], edges: Floats, top: float, up: float) -> str:
    """One path for each colour: neighbours in a row that have the same one are one box."""
    boxes: dict[int, list[str]] = {}
    for i, row in enumerate(levels):
        y = coordinate(top + i * up)
        changes = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
        for a, b in pairwise(changes):
            if (level := int(row[a])) >= 0:
                x, wide = coordinate(edges[a]), coordinate(edges[b] - edges[a])
                boxes.setdefault(level, []).append(f"M{x} {y}h{wide}v{up:.1f}h-{wide}z")
    return "".join(
        element(
            "path", d="".join(found), class_="nonfinite" if level == LEVELS else f"h{level}"
        )
        for level, found in sorted(boxes.items())
    )  # fmt: skip


def distinct(names: Sequence[str], width: float) -> list[str]:
    """The names, short enough for `width`: without the parts that all of them share."""
    shown = list(names)
    if _too_wide(shown, width):
        parts = [name.split(".") for name in names]
        shared = _shared(parts)
        shown = [("…" if shared else "") + ".".join(part[shared:]) for part in parts]
    if _too_wide(shown, width):
        parts = [name.split(".")[::-1] for name in shown]
        shared = _shared(parts)
        shown = [".".join(part[shared:][::-1]) + ("…" if shared else "") for part in parts]
    return [shortened(name, width, 11) for name in shown]


def _too_wide(names: Sequence[str], width: float) -> bool:
    return len(names) > 1 and max(text_width(name, 11) for name in names) > width


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """How many parts, from the first on, all have; one of each name is left."""
    most = min(len(part) for part in parts) - 1
    return next((i for i in range(most) if len({part[i] for part in parts}) > 1), max(most, 0))
