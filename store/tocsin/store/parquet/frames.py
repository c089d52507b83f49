"""From Parquet files back to the frames that were archived. The inverse of `tables`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.frames import Frame, RecordOrigin, StepFrame, SystemFrame, TensorFrame
from tocsin.store.manifest import Kind, StoredFile
from tocsin.store.parquet.column_names import column_of, identifier
from tocsin.store.parquet.duck import Columns, Duck, reading
from tocsin.store.parquet.tables import PART_PLACES, Arrival

N = TypeVar("N", bound=np.generic)

_TENSOR_FIELDS: Final = "bus_offset, append_ms, at_us, step, rank, mode, every, place, tensor"


class Origins(Protocol):
    """Who a rank is."""

    def __call__(self, *, rank: int) -> RecordOrigin:
        """Its origin."""
        ...


class StoredFrames:
    """The frames of one incarnation.

    Args:
        locate: where a file is on this machine; raises FileNotFoundError.
    """

    def __init__(
        self,
        files: Sequence[StoredFile],
        duck: Duck,
        locate: Callable[[str], Path],
        origin: Origins,
    ) -> None:
        self._files = files
        self._duck = duck
        self._locate = locate
        self._origin = origin

    def read(self) -> list[tuple[Arrival, Frame]]:
        """All of them, in no order; in memory. Blocks.

        Raises:
            DamagedStore: a file cannot be read. FileNotFoundError: it is gone.
        """
        found: list[tuple[Arrival, Frame]] = [*self._steps(), *self._samples()]
        for collection in dict.fromkeys(file.collection for file in self._files_of("tensors")):
            found += self._tensors(collection)
        return found

    def _steps(self) -> Iterator[tuple[Arrival, Frame]]:
        files = self._files_of("steps")
        if not files:
            return
        rows = self._duck.columns(
            "SELECT bus_offset, append_ms, at_us, step, rank, mode, name, value "
            f"FROM {self._read(files)} ORDER BY bus_offset, name, at_us, step"
        )
        for frame in _slices(rows["bus_offset"]):
            names, values, width = _grid(rows, frame)
            first = slice(frame.start, frame.start + width)
            yield (
                _arrival(rows, frame),
                StepFrame(
                    origin=self._origin(rank=int(rows["rank"][frame.start])),
                    steps=_whole(rows["step"][first]),
                    at_us=_whole(rows["at_us"][first]),
                    columns=names,
                    values=values.astype(np.float32),
                    mode=cast(Mode, rows["mode"][frame.start]),
                ),
            )

    def _samples(self) -> Iterator[tuple[Arrival, Frame]]:
        files = self._files_of("system")
        if not files:
            return
        rows = self._duck.columns(
            "SELECT bus_offset, append_ms, at_us, rank, node, name, value "
            f"FROM {self._read(files)} ORDER BY bus_offset, name, at_us"
        )
        for frame in _slices(rows["bus_offset"]):
            names, values, width = _grid(rows, frame)
            yield (
                _arrival(rows, frame),
                SystemFrame(
                    origin=self._origin(rank=int(rows["rank"][frame.start])),
                    node=str(rows["node"][frame.start]),
                    at_us=_whole(rows["at_us"][frame.start : frame.start + width]),
                    columns=names,
                    values=values.astype(np.float64),
                ),
            )

    def _tensors(self, collection: str) -> Iterator[tuple[Arrival, Frame]]:
        files = [file for file in self._files_of("tensors") if file.collection == collection]
        named = dict.fromkeys(name for file in files for name in file.columns)
        quoted = {name: identifier(column_of(name)) for name in named}
        # Many statistics of one frame are in several rows, each with some of them.
        chosen = "".join(f", any_value({one}) AS {one}" for one in quoted.values())
        rows = self._duck.columns(
            f"SELECT {_TENSOR_FIELDS}{chosen} FROM {self._read(files)} "
            f"GROUP BY {_TENSOR_FIELDS} ORDER BY bus_offset, place"
        )
        slices = list(_slices(rows["bus_offset"]))
        parts = _parts(rows, slices)
        for frame, (part, of) in zip(slices, parts, strict=True):
            there = {
                name: rows[column_of(name)][frame]
                for name in named
                if not np.ma.getmaskarray(rows[column_of(name)])[frame.start]
            }
            counts = {name: cells for name, cells in there.items() if cells.dtype.kind in "ui"}
            values = {name: cells for name, cells in there.items() if name not in counts}
            height = frame.stop - frame.start
            yield (
                _arrival(rows, frame),
                TensorFrame(
                    origin=self._origin(rank=int(rows["rank"][frame.start])),
                    step=int(rows["step"][frame.start]),
                    collection=collection,
                    rows=tuple(str(name) for name in rows["tensor"][frame]),
                    columns=tuple(values),
                    values=_stacked(values, height, np.float32),
                    count_columns=tuple(counts),
                    counts=_stacked(counts, height, np.uint64),
                    at_us=int(rows["at_us"][frame.start]),
                    mode=cast(Mode, rows["mode"][frame.start]),
                    every=int(rows["every"][frame.start]),
                    part=part,
                    parts=of,
                ),
            )

    def _files_of(self, kind: Kind) -> list[StoredFile]:
        return [file for file in self._files if file.kind == kind]

    def _read(self, files: Sequence[StoredFile]) -> str:
        return reading([self._locate(file.path) for file in files])


def _slices(offsets: npt.NDArray[np.generic]) -> Iterator[slice]:
    """Where the rows of each record are, which are next to one another."""
    cuts = np.flatnonzero(offsets[1:] != offsets[:-1]) + 1
    for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(offsets)], strict=True):
        if end > start:
            yield slice(start, end)


def _grid(rows: Columns, frame: slice) -> tuple[tuple[str, ...], npt.NDArray[np.generic], int]:
    """The names of a long table's frame, its values [points, names], and how many points."""
    names = tuple(dict.fromkeys(str(name) for name in rows["name"][frame]))
    width = (frame.stop - frame.start) // len(names)
    return names, np.asarray(rows["value"][frame]).reshape(len(names), width).T, width


def _arrival(rows: Columns, frame: slice) -> Arrival:
    return Arrival(int(rows["bus_offset"][frame.start]), int(rows["append_ms"][frame.start]))


def _whole(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint64]:
    return np.asarray(values).astype(np.uint64)


def _stacked(
    columns: Mapping[str, npt.NDArray[np.generic]], height: int, kind: type[N]
) -> npt.NDArray[N]:
    found = np.empty((height, len(columns)), kind)
    for place, cells in enumerate(columns.values()):
        found[:, place] = cells
    return found


def _parts(rows: Columns, frames: Sequence[slice]) -> list[tuple[int, int]]:
    """Of each frame which part of its summary it is, and of how many: the parts of a rank's summary
    follow one another, beside those of other ranks."""
    numbers = [int(rows["place"][frame.start]) // PART_PLACES for frame in frames]
    found = [(number, 1) for number in numbers]
    open_: dict[tuple[int, int, str], list[int]] = {}
    for at, (frame, number) in enumerate(zip(frames, numbers, strict=True)):
        key = (
            int(rows["rank"][frame.start]),
            int(rows["step"][frame.start]),
            str(rows["mode"][frame.start]),
        )
        group = open_.setdefault(key, [])
        if number == 0:
            group.clear()
        group.append(at)
        for one in group:
            found[one] = (numbers[one], number + 1)
    return found
