"""Where the numbers of one incarnation come from: Parquet files, or frames of a live bus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tocsin.schemas.records.collections import Mode
from tocsin.store.values import Integers, Reals


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Values over the steps, in the order in which they arrived. All of one length."""

    steps: Integers
    values: Reals
    at_us: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Values of several tensors over the steps, in order of arrival: `values[i]` is that of tensor
    `names[rows[i]]` at `steps[i]`. `names` are in the order of capture."""

    names: tuple[str, ...]
    rows: Integers
    steps: Integers
    values: Reals


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples of a node: `values[i]` is column `columns[names[i]]` at `at_us[i]`."""

    columns: tuple[str, ...]
    names: Integers
    at_us: Integers
    values: Reals


@dataclass(frozen=True, slots=True)
class Contents:
    """What a source has of one collection. `tensors` in the order of capture."""

    tensors: tuple[str, ...]
    statistics: tuple[str, ...]
    steps: frozenset[int]


class Source(Protocol):
    """All of one incarnation of one run. May read files; raises DamagedStore, StoreUnavailable."""

    def steps(self, mode: Mode) -> Integers:
        """The steps that have a row of scalars; may repeat, in any order."""
        ...

    def scalars(self, mode: Mode) -> Iterable[str]:
        """Names of the scalars of steps."""
        ...

    def scalar(self, name: str, mode: Mode, rank: int) -> Points:
        """One scalar; empty where there is none."""
        ...

    def ranks(self) -> frozenset[int]:
        """The ranks with a row of scalars or a summary."""
        ...

    def collections(self) -> Mapping[str, Contents]:
        """What there is of tensors."""
        ...

    def statistic(
        self, collection: str, tensor: str, statistic: str, mode: Mode, rank: int
    ) -> Points:
        """One statistic or count of one tensor; empty where there is none."""
        ...

    def cells(self, collection: str, statistic: str, mode: Mode, rank: int) -> Cells:
        """One statistic or count of all tensors; empty where there is none."""
        ...

    def nodes(self) -> frozenset[str]:
        """The nodes with samples."""
        ...

    def system(self, node: str) -> Samples:
        """All samples of a node; empty where there are none."""
        ...


def no_points() -> Points:
    """Nothing."""
    return Points(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))


def joined(points: Sequence[Points]) -> Points:
    """All of them, by step; of one step the earlier ones first."""
    if not points:
        return no_points()
    steps = np.concatenate([one.steps for one in points])
    order = np.argsort(steps, kind="stable")
    return Points(
        steps[order],
        np.concatenate([one.values for one in points])[order],
        np.concatenate([one.at_us for one in points])[order],
    )
