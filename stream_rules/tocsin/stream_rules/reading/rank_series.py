"""One series of a run: that of its lowest rank that has it.

Under data parallelism the ranks tell the same story, each with the loss of its own batch; one of
them is enough, and whole series of thousands of ranks would be too much to remember.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Series

SERIES_POINTS: Final = 128
"""How many points of the deciding series the evidence carries at most."""


@dataclass(slots=True)
class PointHistory:
    """The last points of a series, as many as the evidence carries."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def append(self, step: int, value: float) -> None:
        """Keep a point."""
        self.steps.append(step)
        self.values.append(float(value))
        del self.steps[:-SERIES_POINTS], self.values[:-SERIES_POINTS]

    def series(self, name: str, *, limit: float | None = None, unit: str | None = None) -> Series:
        """The last points, for the evidence."""
        return Series(
            name=name,
            unit=unit,
            steps=tuple(self.steps[-SERIES_POINTS:]),
            values=tuple(self.values[-SERIES_POINTS:]),
            limit=limit,
        )


@dataclass(slots=True)
class RankSeries(PointHistory):
    """Which rank leads, how far it is, and its last points."""

    rank: int | None = None
    last_step: int = -1

    def overtaken_by(self, frame: StepFrame) -> bool:
        """Whether a frame is of a lower rank than the one that leads, and so begins to lead.

        Asked before `takes`: what a rule has derived so far is then another rank's.
        """
        return self.rank is not None and frame.origin.rank < self.rank

    def accepts(self, frame: StepFrame) -> bool:
        """Whether a frame is of the leading rank, or of a lower one, which leads from then on."""
        rank = frame.origin.rank
        if self.rank is not None and rank > self.rank:
            return False
        if rank != self.rank:
            self.rank, self.last_step = rank, -1
            self.steps, self.values = [], []
        return True

    def points(self, frame: StepFrame, column: str) -> Iterator[tuple[int, float]]:
        """The new points of a column; a step that was there already is left out."""
        values = frame.column(column)
        if values is not None:
            yield from self.new(frame, values.tolist())

    def new(self, frame: StepFrame, values: Sequence[float]) -> Iterator[tuple[int, float]]:
        """The new points of values that were derived from a frame, one for each of its steps."""
        for step, value in zip(frame.steps.tolist(), values, strict=True):
            if self.add(step, value):
                yield step, value

    def add(self, step: int, value: float) -> bool:
        """Take a point; False if that step was there already."""
        if step <= self.last_step:
            return False
        self.last_step = step
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > 2 * SERIES_POINTS:
            del self.steps[:-SERIES_POINTS], self.values[:-SERIES_POINTS]
        return True


StoredRankSeries = Annotated[RankSeries, Field(alias="lead")]
"""A field of a rule's state; snapshots have it under the key `lead`."""
