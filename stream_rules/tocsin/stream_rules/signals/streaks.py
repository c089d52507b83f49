"""For how many summaries in a row a condition has held, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, aligned

Booleans = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Streaks:
    """Streaks of marked rows of one collection.

    `length` and `since` (a step) stand in the order of `rows`.
    """

    rows: list[str] = field(default_factory=list)
    length: StateArray = field(default_factory=lambda: np.zeros(0))
    since: StateArray = field(default_factory=lambda: np.zeros(0))

    def update(
        self, rows: Sequence[str], step: int, holds: Booleans, known: Booleans | None = None
    ) -> Doubles:
        """The length for each of `rows` after a summary.

        One of which nothing is `known` at this step stays as it is; one that left begins anew.
        """
        length = np.nan_to_num(aligned(rows, self.rows, self.length))
        since = aligned(rows, self.rows, self.since)
        self.since = np.where(holds & (length == 0), step, since)
        after = np.where(holds, length + 1, 0)
        self.length = after if known is None else np.where(known, after, length)
        self.rows = list(rows)
        found: Doubles = self.length
        return found
