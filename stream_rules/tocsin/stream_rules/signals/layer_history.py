"""Values of some layers at the last summaries, one row for each summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.issues import Series
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, aligned

Flags = npt.NDArray[np.bool_]

MAX_NUMBERS: Final = 16_384
"""That are remembered, of all layers together: a state has to fit into a record."""

FEWEST: Final = 16
"""Summaries that are remembered in any case, and `SERIES_POINTS` at most."""


@dataclass(slots=True)
class LayerHistory:
    """`values[i, j]` is that of `rows[j]` at `steps[i]`; NaN where it was not there."""

    rows: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: StateArray = field(default_factory=lambda: np.zeros((0, 0)))

    def add(self, step: int, rows: Sequence[str], values: Doubles) -> None:
        """Take a summary. Layers that are gone are forgotten, new ones begin here."""
        known = self.values
        if list(rows) != self.rows:
            known = np.array([aligned(rows, self.rows, one) for one in known])
            self.rows = list(rows)
        known = known.reshape(-1, len(rows))
        most = min(SERIES_POINTS, max(FEWEST, MAX_NUMBERS // max(1, len(rows))))
        self.values = np.concatenate((known, values[None, :]))[-most:]
        self.steps = [*self.steps, step][-most:]

    def first_since(self, step: int) -> Doubles | None:
        """What was reported by the first summary from that step on, unless it is the last."""
        index = int(np.searchsorted(self.steps, step, side="left"))
        return None if index >= len(self.steps) - 1 else self.values[index]

    def series(
        self, row: int, name: str, *, limit: float | None = None, unit: str | None = None
    ) -> Series:
        """The values of one layer, where it has some, for the evidence."""
        column = self.values[:, row]
        known = np.isfinite(column)
        return Series(
            name=name,
            unit=unit,
            steps=tuple(np.asarray(self.steps)[known].tolist()),
            values=tuple(column[known].tolist()),
            limit=limit,
        )
