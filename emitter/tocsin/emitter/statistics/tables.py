"""What a probe has read of one step: tables of numbers, here or on their way from a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    Counts,
    Floats,
    RecordOrigin,
    TensorFrame,
)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers of the tensors of one collection, to be sent as one frame.

    `values` is float32 `[names, columns]`, `counts` uint64 `[names, count_columns]`.
    """

    collection: str
    names: tuple[str, ...]
    values: Floats
    counts: Counts
    columns: tuple[str, ...] = STATISTIC_COLUMNS
    count_columns: tuple[str, ...] = COUNT_COLUMNS

    def frame(
        self, origin: RecordOrigin, step: int, mode: Mode = "train", *, every: int, at_us: int
    ) -> TensorFrame:
        """The table as a frame; `every` is the current interval, `at_us` the Unix time."""
        return TensorFrame(
            origin=origin,
            step=step,
            mode=mode,
            collection=self.collection,
            rows=self.names,
            columns=self.columns,
            values=self.values,
            count_columns=self.count_columns,
            counts=self.counts,
            at_us=at_us,
            every=every,
        )


class Pending(Protocol):
    """What was measured at a step."""

    @property
    def ready(self) -> bool:
        """Whether the numbers are on the host; never waits."""
        ...

    def tables(self) -> Iterable[Table]:
        """The numbers; called once, when they are ready. Tables without names are left out."""
        ...
