"""The readings of one step's modules, on their way to be tables.

On the CPU a sample becomes its statistics at once. On a GPU the samples of all modules are put
together, copied once without waiting, and become statistics when they are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from tocsin.emitter.probes.activations.samples import statistics
from tocsin.emitter.statistics.arrays import Doubles, narrowed
from tocsin.emitter.statistics.async_copy import HostCopy
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts

FLOAT32: Final = float(np.finfo(np.float32).max)


@dataclass(slots=True, eq=False)
class Reading:
    """What was read of a module's output: a sample, and numbers of its own.

    `sample` is `[n]`, float32 or float64, on any device. `values` are of `columns`, `counts` of
    `count_columns`; each is one number, on the host or a scalar tensor. With a sample its
    `statistics`, `[7]` and `[4]`, stand in front of them.
    """

    collection: str
    name: str
    sample: torch.Tensor | None = None
    columns: tuple[str, ...] = ()
    values: Sequence[torch.Tensor | float] = ()
    count_columns: tuple[str, ...] = ()
    counts: Sequence[torch.Tensor | float] = ()
    slot: int | None = None
    """The place of a compiled graph that it is from."""
    statistics: tuple[Doubles, Counts] | None = None

    def read(self) -> None:
        """On the CPU: turn all into numbers now; the tensors may change."""
        if self.sample is not None and self.sample.device.type == "cpu":
            self.statistics = statistics(self.sample.numpy())
            self.sample = None
        self.values = [_number(value) for value in self.values]
        self.counts = [_number(count) for count in self.counts]


def _number(value: torch.Tensor | float) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return float(value)
    return value


@dataclass(slots=True, eq=False)
class Readings:
    """The activation readings of one step, in forward order. A `Pending`."""

    all: list[Reading] = field(default_factory=list)
    _numbers: HostCopy | None = None
    _samples: HostCopy | None = None

    def add(self, reading: Reading) -> None:
        """Add the reading of a module."""
        reading.read()
        self.all.append(reading)

    def send_off(self) -> None:
        """Start the copies from a GPU."""
        numbers = [
            number
            for reading in self.all
            for number in (*reading.values, *reading.counts)
            if isinstance(number, torch.Tensor)
        ]
        samples = [reading.sample for reading in self.all if reading.sample is not None]
        if numbers:
            home = numbers[0].device
            stacked = [number.detach().to(home, torch.float64).reshape(()) for number in numbers]
            self._numbers = HostCopy(torch.stack(stacked))
        if samples:
            home = samples[0].device
            self._samples = HostCopy(torch.cat([s.to(home, torch.float32) for s in samples]))

    @property
    def ready(self) -> bool:
        """Whether all is on the host; never waits."""
        copies = [copy for copy in (self._numbers, self._samples) if copy is not None]
        return all([copy.ready() for copy in copies])

    def tables(self) -> Iterator[Table]:
        """One for each set of columns, rows in forward order."""
        self._arrive()
        groups: dict[tuple[str, tuple[str, ...], tuple[str, ...]], _Rows] = {}
        for order, reading in enumerate(self.all):
            values = np.array(reading.values, np.float64)
            columns, count_columns = reading.columns, reading.count_columns
            counts = np.array(reading.counts, np.float64)
            if not np.isfinite(values).all():
                # No number is no share: what is left is that there are NaN.
                if reading.statistics is None:
                    continue
                columns, values = (), np.zeros(0)
            if reading.statistics is not None:
                columns = (*STATISTIC_COLUMNS, *columns)
                values = np.concatenate((reading.statistics[0], values))
                count_columns = (*COUNT_COLUMNS, "order", *count_columns)
                counts = np.concatenate((reading.statistics[1], [order], counts))
            key = (reading.collection, columns, count_columns)
            rows = groups.setdefault(key, _Rows())
            rows.names.append(reading.name)
            rows.values.append(np.clip(values, -FLOAT32, FLOAT32))
            rows.counts.append(counts)
        for (collection, columns, count_columns), rows in groups.items():
            yield Table(
                collection,
                tuple(rows.names),
                narrowed(np.stack(rows.values)),
                np.stack(rows.counts).astype(np.uint64),
                columns,
                count_columns,
            )

    def _arrive(self) -> None:
        """Put what was copied where it belongs."""
        if self._numbers is not None:
            numbers = iter(self._numbers.values().tolist())
            for reading in self.all:
                reading.values = [_here(value, numbers) for value in reading.values]
                reading.counts = [_here(count, numbers) for count in reading.counts]
        if self._samples is not None:
            samples, at = self._samples.values(), 0
            for reading in self.all:
                if reading.sample is not None:
                    n = reading.sample.numel()
                    reading.statistics = statistics(samples[at : at + n])
                    reading.sample = None
                    at += n


@dataclass(slots=True)
class _Rows:
    names: list[str] = field(default_factory=list)
    values: list[Doubles] = field(default_factory=list)
    counts: list[Doubles] = field(default_factory=list)


def _here(number: torch.Tensor | float, arrived: Iterator[float]) -> float:
    return next(arrived) if isinstance(number, torch.Tensor) else number
