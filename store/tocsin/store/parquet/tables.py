"""From frames and events to tables: columns of numbers, and of names as codes. Pure.

Scalars of steps and samples of nodes are long tables, a row for each number, since anything can be
logged under any name. Tensors have a row for each tensor and step, with a column for each
statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.store.parquet.column_names import column_of

F = TypeVar("F", StepFrame, SystemFrame, TensorFrame)

K = TypeVar("K", bound=Hashable)

Array = npt.NDArray[np.generic]

MAX_COLUMNS: Final = 1_000
"""A frame with more statistics is stored in several tables."""

PART_PLACES: Final = 1 << 20
"""Rows of a frame's part have places from `part` times this number on."""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A column of text: `names[codes[i]]`."""

    codes: npt.NDArray[np.int32]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns of one length, in their order.

    `statistics` are those of tensors as the frames name them.
    """

    columns: dict[str, Array | Names]
    statistics: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """How many."""
        first = next(iter(self.columns.values()))
        return len(first.codes if isinstance(first, Names) else first)

    @property
    def size_bytes(self) -> int:
        """Of its numbers, in memory."""
        return sum(
            one.codes.nbytes if isinstance(one, Names) else one.nbytes
            for one in self.columns.values()
        )


class Arrival(NamedTuple):
    """When a record came onto the bus: its offset, and the bus's time (Unix, milliseconds)."""

    offset: int
    append_ms: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """A record that is not numbers, as it was on the bus. `value` None is a tombstone."""

    topic: str
    offset: int
    append_ms: int
    key: str
    type: str
    version: int
    rank: int
    value: str | None


def step_tables(rows: Iterable[tuple[Arrival, StepFrame]]) -> list[Table]:
    """A row for each scalar of each step; a table for each set of scalars."""
    return [_steps(columns, group) for columns, group in _groups(rows, lambda one: one.columns)]


def system_tables(rows: Iterable[tuple[Arrival, SystemFrame]]) -> list[Table]:
    """A row for each quantity of each sample; a table for each set of quantities."""
    return [_system(columns, group) for columns, group in _groups(rows, lambda one: one.columns)]


def tensor_tables(rows: Iterable[tuple[Arrival, TensorFrame]]) -> list[Table]:
    """A row for each tensor of each frame; a table for each set of tensors and statistics."""
    groups = _groups(rows, lambda one: (one.rows, one.columns, one.count_columns))
    return [table for _, group in groups for table in _tensors(group)]


def event_table(rows: Sequence[EventRow]) -> Table:
    """A row for each record."""

    def text(values: Iterable[str | None]) -> Array:
        return np.array([*values, None], object)[:-1]

    return Table(
        {
            "topic": _names(row.topic for row in rows),
            "bus_offset": np.array([row.offset for row in rows], np.int64),
            "append_ms": np.array([row.append_ms for row in rows], np.int64),
            "key": text(row.key for row in rows),
            "type": _names(row.type for row in rows),
            "version": np.array([row.version for row in rows], np.int32),
            "rank": np.array([row.rank for row in rows], np.int64),
            "value": text(row.value for row in rows),
        }
    )


def _steps(columns: tuple[str, ...], group: Sequence[tuple[Arrival, StepFrame]]) -> Table:
    lengths = np.array([frame.steps.size for _, frame in group])
    width = len(columns)
    each = lengths * width
    return Table(
        {
            **_arrivals(group, each),
            "at_us": _spread([frame.at_us for _, frame in group], width),
            "step": _spread([frame.steps for _, frame in group], width),
            "rank": np.repeat(_ranks(group), each),
            "mode": _repeated([frame.mode for _, frame in group], each),
            "name": _tiled(columns, int(lengths.sum())),
            "value": np.concatenate([frame.values.ravel() for _, frame in group]),
        }
    )


def _system(columns: tuple[str, ...], group: Sequence[tuple[Arrival, SystemFrame]]) -> Table:
    lengths = np.array([frame.at_us.size for _, frame in group])
    width = len(columns)
    each = lengths * width
    return Table(
        {
            **_arrivals(group, each),
            "at_us": _spread([frame.at_us for _, frame in group], width),
            "rank": np.repeat(_ranks(group), each),
            "node": _repeated([frame.node for _, frame in group], each),
            "name": _tiled(columns, int(lengths.sum())),
            "value": np.concatenate([frame.values.ravel() for _, frame in group]),
        }
    )


def _tensors(group: Sequence[tuple[Arrival, TensorFrame]]) -> Iterator[Table]:
    first = group[0][1]
    height, frames = len(first.rows), len(group)
    each = np.full(frames, height)
    places = np.arange(height, dtype=np.int32)
    parts = np.array([min(frame.part, 1_000) for _, frame in group], np.int32)
    fixed: dict[str, Array | Names] = {
        **_arrivals(group, each),
        "at_us": np.repeat(np.array([frame.at_us for _, frame in group], np.int64), each),
        "step": np.repeat(np.array([frame.step for _, frame in group], np.int64), each),
        "rank": np.repeat(_ranks(group), each),
        "mode": _repeated([frame.mode for _, frame in group], each),
        "every": np.repeat(np.array([frame.every for _, frame in group], np.int64), each),
        "place": (parts[:, None] * PART_PLACES + places[None, :]).ravel().astype(np.int32),
        "tensor": _tiled(first.rows, frames),
    }
    values = np.concatenate([frame.values for _, frame in group])
    counts = np.concatenate([frame.counts for _, frame in group])
    statistics: dict[str, Array] = {}
    for place, name in enumerate(first.columns):
        statistics[name] = values[:, place]
    for place, name in enumerate(first.count_columns):
        # Of a name that is both, the statistic counts, as for a reader of the frame.
        statistics.setdefault(name, counts[:, place])
    names = list(statistics)
    for start in range(0, max(1, len(names)), MAX_COLUMNS):
        some = names[start : start + MAX_COLUMNS]
        yield Table(fixed | {column_of(name): statistics[name] for name in some}, tuple(some))


def _groups(
    rows: Iterable[tuple[Arrival, F]], key: Callable[[F], K]
) -> Iterable[tuple[K, list[tuple[Arrival, F]]]]:
    found: dict[K, list[tuple[Arrival, F]]] = {}
    for offset, frame in rows:
        found.setdefault(key(frame), []).append((offset, frame))
    return found.items()


def _arrivals(
    group: Sequence[tuple[Arrival, F]], each: npt.NDArray[np.int_]
) -> dict[str, Array | Names]:
    found = np.array([arrival for arrival, _ in group], np.int64)
    return {"bus_offset": np.repeat(found[:, 0], each), "append_ms": np.repeat(found[:, 1], each)}


def _ranks(
    group: Sequence[tuple[Arrival, StepFrame | SystemFrame | TensorFrame]],
) -> npt.NDArray[np.int64]:
    return np.array([frame.origin.rank for _, frame in group], np.int64)


def _spread(arrays: Sequence[npt.NDArray[np.uint64]], width: int) -> Array:
    """Each number as often as there are columns, as int64."""
    return np.repeat(np.concatenate(arrays), width).astype(np.int64)


def _repeated(values: Sequence[str], each: npt.NDArray[np.int_]) -> Names:
    found = _names(values)
    return Names(np.repeat(found.codes, each), found.names)


def _tiled(names: tuple[str, ...], times: int) -> Names:
    return Names(np.tile(np.arange(len(names), dtype=np.int32), times), names)


def _names(values: Iterable[str]) -> Names:
    names: dict[str, int] = {}
    codes = [names.setdefault(value, len(names)) for value in values]
    return Names(np.array(codes, np.int32), tuple(names))
