"""What the picture of a series shows: the line, its limit, and the step of the issue. Pure.

The mail draws it with matplotlib (`picture`), the documentation as SVG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tocsin.schemas.records.issues import Series

_LOG_FROM: Final = 1000.0
"""Ratio of the largest value to the smallest from which the axis is logarithmic."""

_DOTS: Final = 60
"""Up to so many values are marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A series to be drawn. Values may be NaN or infinite: such steps are marked, not drawn.

    Attributes:
        x: what `steps` count, as in a `Series`.
        limit: None if there is none that can be drawn.
        first_step: None if it is none of these steps.
    """

    name: str
    x: str | None = None
    unit: str | None
    steps: Sequence[int]
    values: Sequence[float]
    limit: float | None
    first_step: int | None

    @classmethod
    def from_series(cls, series: Series, first_step: int | None) -> Drawing:
        """The drawing of a series with one value at least."""
        low, high = min(series.steps), max(series.steps)
        inside = series.x is None and first_step is not None and low <= first_step <= high
        return cls(
            name=series.name,
            x=series.x,
            unit=series.unit,
            steps=tuple(series.steps),
            values=tuple(series.values),
            limit=None if series.limit is None or not drawable(series.limit) else series.limit,
            first_step=first_step if inside else None,
        )

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The steps and values that are drawn."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if drawable(v)]

    @property
    def gone(self) -> list[int]:
        """The steps whose value is NaN, infinite, or too large to be drawn."""
        return [s for s, v in zip(self.steps, self.values, strict=True) if not drawable(v)]

    @property
    def heights(self) -> list[float]:
        """The values that the vertical axis must hold, the limit's too."""
        return [*(v for _, v in self.finite), *([] if self.limit is None else [self.limit])]

    @property
    def logarithmic(self) -> bool:
        """Whether the vertical axis is."""
        heights = self.heights
        return bool(heights) and min(heights) > 0 and max(heights) / min(heights) > _LOG_FROM

    @property
    def dotted(self) -> bool:
        """Whether each value is marked."""
        return len(self.values) <= _DOTS

    @property
    def x_label(self) -> str:
        """What the horizontal axis counts."""
        return "step" if self.x is None else "seconds since the first sample"

    @property
    def y_label(self) -> str:
        """The name, with the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


def drawable(value: float) -> bool:
    """Whether a value has a place in a picture."""
    return math.isfinite(value) and abs(value) < 1e300


def to_json(drawing: Drawing) -> str:
    """As `from_json` reads it. NaN and infinities stand as Python's json writes them."""
    return json.dumps(asdict(drawing))


def from_json(text: str) -> Drawing:
    """What `to_json` wrote. Raises ValueError, TypeError."""
    return Drawing(**json.loads(text))
