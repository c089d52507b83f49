"""Several statistics of the same tensors, side by side. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from tocsin.store.values import Integers, Matrix, Reals


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """What all of the statistics have.

    Attributes:
        values: by name, float64[rows, steps].
        present: bool[rows, steps]: whether each statistic has a value there.
    """

    rows: tuple[str, ...]
    steps: Integers
    values: Mapping[str, Reals]
    present: npt.NDArray[np.bool_]


def aligned(matrices: Mapping[str, Matrix]) -> Aligned:
    """The rows and steps that are in each of the matrices, of which there is at least one."""
    first = next(iter(matrices.values()))
    common = set.intersection(*(set(one.rows) for one in matrices.values()))
    rows = tuple(row for row in first.rows if row in common)
    steps: Integers = reduce(np.intersect1d, (one.steps for one in matrices.values()))
    values, present = {}, np.ones((len(rows), steps.size), np.bool_)
    for name, one in matrices.items():
        number = {row: place for place, row in enumerate(one.rows)}
        places = np.ix_(
            np.array([number[row] for row in rows], np.int64), np.searchsorted(one.steps, steps)
        )
        values[name] = one.values[places]
        present &= one.present[places]
    return Aligned(rows, steps, values, present)
