"""Full rows of tensors for the collections that are due: read once, sent to each.

A row has the statistics and, from a sample, the quantiles. What low-precision tensors have beside
it (how much of them is at the ends of their type's range) is a table of its own: in one table all
rows have the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from tocsin.emitter.statistics.arrays import narrowed
from tocsin.emitter.statistics.async_copy import HostCopy, by_device
from tocsin.emitter.statistics.low_precision import LOW_PRECISION_COLUMNS, LowPrecision
from tocsin.emitter.statistics.quantiles import QUANTILES, ROW_COLUMNS
from tocsin.emitter.statistics.reductions import Rows, Summary
from tocsin.emitter.statistics.tables import Table
from tocsin.emitter.statistics.tensor_quantiles import Quantiles
from tocsin.schemas.records.frames import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts, Floats


class Wanted(NamedTuple):
    """A collection, the names it holds (None: all), and its columns (None: all)."""

    collection: str
    names: frozenset[str] | None = None
    columns: tuple[str, ...] | None = None

    def has(self, *columns: str) -> bool:
        """Whether one of these columns is wanted."""
        return self.columns is None or not set(columns).isdisjoint(self.columns)


class TensorRows:
    """Rows of tensors, each `[n]`, of one device or several. On a GPU they come later.

    With `precision` those of low precision have a second table.
    """

    def __init__(
        self,
        names: Sequence[str],
        flat: Sequence[torch.Tensor],
        wanted: Sequence[Wanted],
        *,
        precision: bool = False,
    ) -> None:
        chosen = _union(wanted)
        if chosen is not None:
            kept = [i for i, name in enumerate(names) if name in chosen]
            names, flat = [names[i] for i in kept], [flat[i] for i in kept]
        self.names: Final = list(names)
        self.whole: Final = chosen is None
        """Whether all tensors are in it."""
        self._wanted = wanted
        places = by_device(flat)
        self._parts: list[tuple[list[int], Summary, HostCopy | None]] = []
        with torch.no_grad():
            for at in places.values():
                summary = Summary([flat[i] for i in at])
                packed = summary.packed
                self._parts.append((at, summary, None if packed is None else HostCopy(packed)))
        sampled = any(each.has(*QUANTILES) for each in wanted)
        self._quantiles = Quantiles(flat) if sampled else None
        precision = precision and any(each.has(*LOW_PRECISION_COLUMNS) for each in wanted)
        self._precision = LowPrecision(names, flat) if precision else None
        on_cpu = all(device.type == "cpu" for device in places)
        # What is not finite is read once more: before the tensors change.
        self._rows: Rows | None = self._collect() if on_cpu else None

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return self._rows is not None or (
            all(copy is None or copy.ready() for *_, copy in self._parts)
            and (self._quantiles is None or self._quantiles.ready)
            and (self._precision is None or self._precision.ready)
        )

    @property
    def rows(self) -> Rows:
        """All rows, once they are ready."""
        if self._rows is None:
            self._rows = self._collect()
        return self._rows

    @property
    def norms(self) -> Floats:
        """The L2 norm of each, `[names]`, once ready; NaN or infinite where a tensor is."""
        rows = self.rows
        l2 = rows.values[:, STATISTIC_COLUMNS.index("l2")].copy()
        l2[rows.counts[:, 3] > 0] = np.inf
        l2[rows.counts[:, 2] > 0] = np.nan
        return l2

    def tables(self, divisor: float = 1.0) -> Iterator[Table]:
        """One for each collection, of the tensors divided by that; and one of the ends of
        low-precision tensors, as they are.
        """
        rows = self.rows
        values = rows.values
        of: tuple[str, ...] = STATISTIC_COLUMNS
        if self._quantiles is not None:
            values, of = np.hstack((values, self._quantiles.rows)), ROW_COLUMNS
        if divisor != 1.0:
            values = narrowed(values / divisor)
        for each in self._wanted:
            yield _table(each, self.names, of, values, rows.counts, COUNT_COLUMNS)
        if self._precision is None or not self._precision.names:
            return
        precision = self._precision
        shares, numel = precision.rows
        for each in self._wanted:
            if each.has(*LOW_PRECISION_COLUMNS):
                yield _table(
                    each, precision.names, LOW_PRECISION_COLUMNS, shares, numel, ("numel",)
                )

    def _collect(self) -> Rows:
        n = len(self.names)
        values = np.zeros((n, len(STATISTIC_COLUMNS)), np.float32)
        counts = np.zeros((n, len(COUNT_COLUMNS)), np.uint64)
        for at, summary, copy in self._parts:
            rows = summary.rows(None if copy is None else copy.values())
            values[at], counts[at] = rows.values, rows.counts
        self._parts.clear()
        return Rows(values, counts)


def _table(
    wanted: Wanted,
    names: Sequence[str],
    columns: tuple[str, ...],
    values: Floats,
    counts: Counts,
    count_columns: tuple[str, ...],
) -> Table:
    """What a collection wants of it."""
    if wanted.names is not None:
        kept = [i for i, name in enumerate(names) if name in wanted.names]
        names, values, counts = [names[i] for i in kept], values[kept], counts[kept]
    if wanted.columns is not None:
        at = [i for i, column in enumerate(columns) if column in wanted.columns]
        columns, values = tuple(columns[i] for i in at), values[:, at]
    return Table(wanted.collection, tuple(names), values, counts, columns, count_columns)


def _union(wanted: Sequence[Wanted]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for each in wanted:
        if each.names is None:
            return None
        found |= each.names
    return found
