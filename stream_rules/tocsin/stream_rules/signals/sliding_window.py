"""The last samples of some quantities of a node or a device, and when they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import Counts, Doubles
from tocsin.schemas.records.issues import Series
from tocsin.stream_rules.outcomes import Moment
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.state_codec import StateArray

STARTING_MS: Final = 600_000
"""How long a job without steps is taken to be starting, milliseconds."""


@dataclass(slots=True)
class TrainingStart:
    """What a job does before its first step (data are read, kernels are chosen) is no measure of
    its training; one that makes no steps is watched after its first ten minutes."""

    first_ms: int | None = None

    def is_over(self, at: Moment) -> bool:
        """Whether the job trains by now."""
        if self.first_ms is None:
            self.first_ms = at.now_ms
        return at.run.last_step is not None or at.now_ms >= self.first_ms + STARTING_MS


@dataclass(slots=True)
class SlidingWindow:
    """Rows of the last `window` samples; `seconds` counts from the first sample."""

    seen: int = 0
    start_us: int | None = None
    last_us: int = -1
    seconds: StateArray = field(default_factory=lambda: np.zeros(0))
    rows: StateArray = field(default_factory=lambda: np.zeros((0, 0)))

    def add(self, at_us: Counts, columns: Sequence[Doubles], *, window: int) -> bool:
        """Take the samples that are new and have a number in each column; whether there was any."""
        times = at_us.astype(np.int64)
        rows = np.column_stack(columns)
        new = (times > self.last_us) & np.isfinite(rows).all(1)
        if not new.any():
            return False
        if self.start_us is None:
            self.start_us = int(times[new][0])
        self.last_us = int(times[new][-1])
        self.seen += int(new.sum())
        seconds = (times[new] - self.start_us) / 1e6
        before = self.rows if self.rows.shape[1] == rows.shape[1] else rows[:0]
        self.seconds = np.concatenate([self.seconds, seconds])[-window:]
        self.rows = np.concatenate([before, rows[new]])[-window:]
        return True

    @property
    def span_s(self) -> float:
        """From the first sample of the window to the last, seconds."""
        return float(self.seconds[-1] - self.seconds[0]) if len(self.seconds) else 0.0

    def series(self, name: str, unit: str, column: int = 0, limit: float | None = None) -> Series:
        """One quantity, thinned out for the evidence."""
        every = max(1, len(self.rows) // SERIES_POINTS + 1)
        return Series(
            name=f"{name} by second"[:200],
            unit=unit,
            x="s",
            steps=tuple(max(0, round(t)) for t in self.seconds[::every].tolist()),
            values=tuple(self.rows[::every, column].tolist()),
            limit=limit,
        )
