"""What a run gives back: series, matrices, samples of a node. Frozen values around numpy arrays."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.errors import ConfigurationError
from tocsin.store.errors import NotCaptured

if TYPE_CHECKING:
    import pandas

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

_UNITS: Final = (
    ("_us", "µs"),
    ("_ms", "ms"),
    ("_s", "s"),
    ("percent", "%"),
    ("_bytes_per_s", "B/s"),
    ("_bytes", "B"),
    ("_watts", "W"),
    ("_celsius", "°C"),
    ("_hertz", "Hz"),
)


def unit_of(name: str) -> str | None:
    """The unit that the name of a column ends with; None: it has none, or is a user's own."""
    if name.startswith(("log.", "loss")):
        return None
    found = [(suffix, unit) for suffix, unit in _UNITS if name.endswith(suffix)]
    return max(found, key=lambda one: len(one[0]))[1] if found else None


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One number over the steps.

    Attributes:
        steps: int64[n], ascending; in other modes than train the last step of training, so that
            the batches of an evaluation share one.
        values: float64[n]; NaN and infinities are values.
        at_us: int64[n], the sender's clock (Unix, microseconds).
        name: the scalar, or TENSOR/STATISTIC.
        unit: of the values; None: none.
    """

    steps: Integers = field(repr=False)
    values: Reals = field(repr=False)
    at_us: Integers = field(repr=False)
    name: str = ""
    unit: str | None = None

    def __len__(self) -> int:
        return int(self.steps.size)

    def to_pandas(self) -> pandas.Series:
        """The values by step. Raises ConfigurationError: pandas is not installed."""
        index = _pandas().Index(self.steps, name="step")
        series: pandas.Series = _pandas().Series(self.values, index=index, name=self.name)
        return series


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One statistic of all tensors of a collection over the steps.

    Attributes:
        rows: names of the tensors, in the order in which they were captured.
        steps: int64[s], ascending.
        values: float64[rows, s]; NaN where a tensor has no value at a step, and where the value is
            NaN.
        present: bool[rows, s]: whether there is a value.
        name: the statistic.
    """

    rows: tuple[str, ...] = field(repr=False)
    steps: Integers = field(repr=False)
    values: Reals = field(repr=False)
    present: npt.NDArray[np.bool_] = field(repr=False)
    name: str = ""

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each step, a column for each tensor. Raises as `Series.to_pandas`."""
        index = _pandas().Index(self.steps, name="step")
        frame: pandas.DataFrame = _pandas().DataFrame(
            self.values.T, index=index, columns=list(self.rows)
        )
        return frame


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """Samples of one node.

    Attributes:
        node: its host name.
        at_us: int64[n], ascending (Unix, microseconds).
        columns: names that carry their unit, as docs/reference/captured-data.md lists them.
        values: float64[n, columns]; NaN where a column was not sampled.
    """

    node: str
    at_us: Integers = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)
    values: Reals = field(repr=False)

    def column(self, name: str) -> Reals:
        """One quantity over the samples, float64[n].

        Raises:
            NotCaptured: the node has no such column.
        """
        if name not in self.columns:
            raise NotCaptured("column", name, self.columns)
        return self.values[:, self.columns.index(name)]

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each sample, by time (UTC). Raises as `Series.to_pandas`."""
        pd = _pandas()
        index = pd.to_datetime(self.at_us, unit="us", utc=True).rename("at")
        frame: pandas.DataFrame = pd.DataFrame(self.values, index=index, columns=list(self.columns))
        return frame


@dataclass(frozen=True, slots=True)
class Collection:
    """What was captured under one name.

    Attributes:
        tensors: in the order in which they were captured.
        statistics: names of statistics and counts.
        steps: how many steps have a summary, over all ranks and modes.
        saved: how many tensors were saved in full.
    """

    name: str
    tensors: tuple[str, ...] = field(repr=False)
    statistics: tuple[str, ...]
    steps: int
    saved: int = 0


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run in the store, from its manifest: no telemetry was read.

    Attributes:
        incarnations: the oldest first.
        started_ms, ended_ms: Unix milliseconds; `ended_ms` is None while it runs, or is not known.
        state: running, ended or lost, as the rules saw it last; empty: not known.
        outcome: completed, failed, stopped or interrupted; empty: not known.
        last_step: of the newest incarnation; None before the first step.
        size_bytes: of its files.
        updated_ms: when something was written of it last, Unix milliseconds.
    """

    run_id: str
    incarnations: tuple[str, ...]
    started_ms: int
    ended_ms: int | None
    state: str
    outcome: str
    labels: Mapping[str, str]
    last_step: int | None
    size_bytes: int
    updated_ms: int = 0


def wide(columns: Mapping[str, Series]) -> pandas.DataFrame:
    """A row for each step, a column for each series; of several values of a step the last.

    Raises:
        ConfigurationError: pandas is not installed.
    """
    pd = _pandas()
    rows = [one.to_pandas() for one in columns.values()]
    last = [row[~row.index.duplicated(keep="last")] for row in rows]
    frame: pandas.DataFrame = (
        pd.concat(last, axis=1, keys=list(columns)) if last else pd.DataFrame()
    )
    return frame.sort_index()


def _pandas() -> ModuleType:
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise ConfigurationError(
            "to_pandas needs pandas, which is not installed: try `pip install pandas`"
        ) from error
