"""Labels, predictions and hits of each class, added up over the summaries of one mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, LowestRankRows

_MAX_SUMMARIES: Final = 64
"""Summaries, or pairs of them, that are kept apart at most."""

_MAX_CELLS: Final = 1 << 15
"""Counts other than 0 that are kept apart by summary: a state has to fit into a record."""

_LARGEST: Final = np.iinfo(np.uint32).max


@dataclass(slots=True)
class _Counts:
    """A table without its zeros, of which it mostly consists: 500 labels are few of 10,000 cells.

    `at` are places in the table as it is in memory.
    """

    shape: list[int]
    at: StateArray
    counts: StateArray

    @classmethod
    def from_table(cls, table: Doubles) -> _Counts:
        at = np.flatnonzero(table)
        counts = np.minimum(table.ravel()[at], _LARGEST)
        return cls(list(table.shape), at.astype(np.uint32), counts.astype(np.uint32))


def _sum(tables: Sequence[_Counts]) -> Doubles:
    """All together, as large as the largest."""
    whole = np.zeros(np.max([table.shape for table in tables], axis=0))
    for table in tables:
        whole[np.unravel_index(table.at, table.shape)] += table.counts
    return whole


@dataclass(slots=True)
class Recent:
    """The counts of the last summaries: as many as hold `samples` labels, and no more.

    The first axis are the classes; a later summary may have more of them. Where there are too many
    tables, or too many numbers in them, pairs of them are put together, and it may be up to twice
    as many labels.
    """

    tables: list[_Counts] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)

    def add(self, table: Doubles, labels: float, samples: int) -> None:
        """Take a summary of so many labels; what is not needed for `samples` is left out."""
        self.tables.append(_Counts.from_table(table))
        self.labels.append(labels)
        while sum(self.labels[1:]) >= samples:
            del self.tables[0], self.labels[0]
        while len(self.tables) > 2 and self._is_large():
            self._halve()

    def _is_large(self) -> bool:
        cells = sum(len(one.at) for one in self.tables)
        return len(self.tables) > _MAX_SUMMARIES or cells > _MAX_CELLS

    def _halve(self) -> None:
        """Put pairs together; not the first one, which goes next, and would never."""
        pairs = range(1, len(self.tables), 2)
        self.tables[1:] = [_Counts.from_table(_sum(self.tables[i : i + 2])) for i in pairs]
        self.labels[1:] = [sum(self.labels[i : i + 2]) for i in pairs]

    @property
    def seen(self) -> float:
        """How many labels."""
        return sum(self.labels)

    def total(self) -> Doubles:
        """All together, as large as the largest."""
        return _sum(self.tables)


@dataclass(slots=True)
class ClassTotals:
    """The classes of one mode.

    `labels` are those of all summaries so far, the first of which began at step `since`; `recent`
    has labels and hits of the last ones.
    """

    frames: LowestRankRows = field(default_factory=LowestRankRows)
    labels: StateArray = field(default_factory=lambda: np.zeros(0))
    recent: Recent = field(default_factory=Recent)
    predicted: bool = False
    since: int | None = None
    summaries: int = 0

    def add(self, frame: TensorFrame, samples: int) -> TensorFrame | None:
        """Add a summary of the collection `labels`; None: it is not new, or not whole."""
        whole = self.frames.assemble(frame)
        labels = None if whole is None else whole.count("labels")
        if whole is None or labels is None or not len(whole.rows):
            return None
        counted = labels.astype(np.float64)
        known = np.zeros(max(len(counted), len(self.labels)))
        known[: len(self.labels)] = self.labels
        known[: len(counted)] += counted
        self.labels = known
        if self.since is None:
            self.since = max(0, whole.step - whole.every)
        self.summaries += 1
        hits = whole.count("hits")
        self.predicted = hits is not None
        right = counted * 0 if hits is None else hits.astype(np.float64)
        self.recent.add(np.column_stack((counted, right)), float(counted.sum()), samples)
        return whole
