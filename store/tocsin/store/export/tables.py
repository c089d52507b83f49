"""A run as tables: `runs`, `issues`, `deliveries`, `steps`, `tensors`, `system`. Blocks.

Numbers are long tables, a row for each number, since anything can be logged under any name. They
come in pieces, so that a run of any size fits into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.collections import MODES
from tocsin.store.errors import NotCaptured
from tocsin.store.export.series import scalars_of
from tocsin.store.query.facts import Facts, facts_of
from tocsin.store.run import Run

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]

NUMBERS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "steps": (
        ("mode", "VARCHAR"),
        ("rank", "BIGINT"),
        ("name", "VARCHAR"),
        ("step", "BIGINT"),
        ("at_us", "BIGINT"),
        ("value", "DOUBLE"),
    ),
    "tensors": (
        ("collection", "VARCHAR"),
        ("mode", "VARCHAR"),
        ("rank", "BIGINT"),
        ("statistic", "VARCHAR"),
        ("tensor", "VARCHAR"),
        ("step", "BIGINT"),
        ("value", "DOUBLE"),
    ),
    "system": (
        ("node", "VARCHAR"),
        ("name", "VARCHAR"),
        ("at_us", "BIGINT"),
        ("value", "DOUBLE"),
    ),
}
"""Tables of numbers, with their columns and the types of these in SQL."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some rows: what they have in common, and columns of the rest.

    Attributes:
        same: the first columns, which are equal in all rows.
        columns: the others, of one length; a list holds text.
    """

    same: Sequence[str | int]
    columns: Sequence[Numbers | Sequence[str]]

    def __len__(self) -> int:
        return len(self.columns[-1])


def facts(run: Run) -> Mapping[str, Facts]:
    """The run, its issues and its deliveries, each in its newest state."""
    return facts_of(run.runs_view, frozenset([run.run_id]))


def pieces(run: Run, table: str) -> Iterator[Piece]:
    """The rows of a table of numbers. Raises what `Run` does."""
    return {"steps": _steps, "tensors": _tensors, "system": _system}[table](run)


def _steps(run: Run) -> Iterator[Piece]:
    for one in scalars_of(run):
        series = one.series
        yield Piece((one.mode, one.rank, series.name), (series.steps, series.at_us, series.values))


def _tensors(run: Run) -> Iterator[Piece]:
    for collection, found in run.collections().items():
        for mode in MODES:
            for rank in run.ranks():
                for statistic in found.statistics:
                    try:
                        matrix = run.matrix(collection, statistic, rank, mode)
                    except NotCaptured:
                        continue
                    rows, columns = np.nonzero(matrix.present)
                    yield Piece(
                        (collection, mode, rank, statistic),
                        (
                            [matrix.rows[row] for row in rows],
                            matrix.steps[columns],
                            matrix.values[rows, columns],
                        ),
                    )


def _system(run: Run) -> Iterator[Piece]:
    for node in run.nodes():
        system = run.system(node)
        for name in system.columns:
            values = system.column(name)
            there = ~np.isnan(values)
            if there.any():
                yield Piece((node, name), (system.at_us[there], values[there]))
