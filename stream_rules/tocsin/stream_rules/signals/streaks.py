"""For how many checks in a row a condition has held: of a rule, or of each row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, aligned

Booleans = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Streak:
    """How many checks in a row, and where the first of them was: its step, and its append time."""

    length: int = 0
    first_step: int = 0
    first_ms: int = 0

    def update(self, step: int, now_ms: int, *, holds: bool) -> int:
        """The length after a check."""
        if holds and not self.length:
            self.first_step, self.first_ms = step, now_ms
        self.length = self.length + 1 if holds else 0
        return self.length


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
