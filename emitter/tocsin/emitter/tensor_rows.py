"""Full rows of tensors for the collections that are due: read once, sent to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from tocsin.emitter.host_copy import HostCopy
from tocsin.emitter.summaries import Rows, Summary
from tocsin.emitter.tables import Table
from tocsin.schemas.telemetry import COUNT_COLUMNS, STATISTIC_COLUMNS, Floats


class Wanted(NamedTuple):
    """A collection, the names it holds (None: all), and its columns (None: all)."""

    collection: str
    names: frozenset[str] | None = None
    columns: tuple[str, ...] | None = None


class TensorRows:
    """Rows of flat tensors, of one device or several. On a GPU they come later."""

    def __init__(
        self, names: Sequence[str], flat: Sequence[torch.Tensor], wanted: Sequence[Wanted]
    ) -> None:
        chosen = _union(wanted)
        if chosen is not None:
            kept = [i for i, name in enumerate(names) if name in chosen]
            names, flat = [names[i] for i in kept], [flat[i] for i in kept]
        self.names: Final = list(names)
        self.whole: Final = chosen is None
        """Whether all tensors are in it."""
        self._wanted = wanted
        places: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(flat):
            places.setdefault(tensor.device, []).append(i)
        self._parts: list[tuple[list[int], Summary, HostCopy | None]] = []
        with torch.no_grad():
            for at in places.values():
                summary = Summary([flat[i] for i in at])
                packed = summary.packed
                self._parts.append((at, summary, None if packed is None else HostCopy(packed)))
        on_cpu = all(device.type == "cpu" for device in places)
        # What is odd is read once more: before the tensors change.
        self._rows: Rows | None = self._collect() if on_cpu else None

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return self._rows is not None or all(
            copy is None or copy.ready() for *_, copy in self._parts
        )

    @property
    def rows(self) -> Rows:
        """All rows, once they are ready."""
        if self._rows is None:
            self._rows = self._collect()
        return self._rows

    @property
    def norms(self) -> Floats:
        """The L2 norm of each; NaN or infinite where a tensor is."""
        rows = self.rows
        l2 = rows.values[:, STATISTIC_COLUMNS.index("l2")].copy()
        l2[rows.counts[:, 3] > 0] = np.inf
        l2[rows.counts[:, 2] > 0] = np.nan
        return l2

    def tables(self) -> Iterator[Table]:
        """One for each collection."""
        rows = self.rows
        for collection, chosen, columns in self._wanted:
            kept: Sequence[int] | slice = slice(None)
            names = tuple(self.names)
            if chosen is not None:
                kept = [i for i, name in enumerate(self.names) if name in chosen]
                names = tuple(self.names[i] for i in kept)
            values, of = rows.values[kept], STATISTIC_COLUMNS
            if columns is not None:
                of = tuple(column for column in STATISTIC_COLUMNS if column in columns)
                values = values[:, [STATISTIC_COLUMNS.index(column) for column in of]]
            yield Table(collection, names, values, rows.counts[kept], of, COUNT_COLUMNS)

    def _collect(self) -> Rows:
        n = len(self.names)
        values = np.zeros((n, len(STATISTIC_COLUMNS)), np.float32)
        counts = np.zeros((n, len(COUNT_COLUMNS)), np.uint64)
        for at, summary, copy in self._parts:
            rows = summary.rows(None if copy is None else copy.values())
            values[at], counts[at] = rows.values, rows.counts
        self._parts.clear()
        return Rows(values, counts)


def _union(wanted: Sequence[Wanted]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for each in wanted:
        if each.names is None:
            return None
        found |= each.names
    return found
