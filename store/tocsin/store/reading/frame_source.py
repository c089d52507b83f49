"""A source of what is not in files yet: the frames of a live bus, held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.frames import Frame, StepFrame, SystemFrame, TensorFrame
from tocsin.store.known_records import Mark
from tocsin.store.reading.source import Cells, Contents, Points, Samples, joined
from tocsin.store.values import Integers, Reals


class FrameSource:
    """The frames of one incarnation, in order of arrival. See `Source`."""

    def __init__(self) -> None:
        self._steps: list[StepFrame] = []
        self._system: list[SystemFrame] = []
        self._tensors: dict[str, list[TensorFrame]] = {}
        # Each frame brings its own copy of thousands of names, most often the same.
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, frame: Frame, offset: int = 0, append_ms: int = 0) -> None:
        """Take one more, from that place of its partition."""
        self._places[id(frame)] = offset, append_ms
        match frame:
            case StepFrame():
                self._steps.append(frame)
            case SystemFrame():
                self._system.append(frame)
            case TensorFrame():
                rows = self._names.setdefault(frame.rows, frame.rows)
                object.__setattr__(frame, "rows", rows)
                self._tensors.setdefault(frame.collection, []).append(frame)

    def drop(self, mark: Mark) -> None:
        """Drop what is in files by now."""

        def kept(frame: Frame) -> bool:
            return not mark.covers(*self._places[id(frame)])

        self._steps = list(filter(kept, self._steps))
        self._system = list(filter(kept, self._system))
        found = {name: list(filter(kept, frames)) for name, frames in self._tensors.items()}
        self._tensors = {name: frames for name, frames in found.items() if frames}
        left = {id(frame) for frame in [*self._numbers(), *self._system]}
        self._places = {key: place for key, place in self._places.items() if key in left}

    def __bool__(self) -> bool:
        return bool(self._steps or self._system or self._tensors)

    def steps(self, mode: Mode) -> Integers:
        """The steps that have a row of scalars; may repeat, in any order."""
        found = [frame.steps for frame in self._steps if frame.mode == mode]
        return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)

    def scalars(self, mode: Mode) -> Iterable[str]:
        """Names of the scalars of steps."""
        return dict.fromkeys(
            name for frame in self._steps if frame.mode == mode for name in frame.columns
        )

    def scalar(self, name: str, mode: Mode, rank: int) -> Points:
        """One scalar; empty where there is none."""
        found = []
        for frame in self._steps:
            if frame.mode != mode or frame.origin.rank != rank:
                continue
            values = frame.column(name)
            if values is not None:
                found.append(
                    Points(
                        frame.steps.astype(np.int64),
                        values.astype(np.float64),
                        frame.at_us.astype(np.int64),
                    )
                )
        return joined(found)

    def ranks(self) -> frozenset[int]:
        """The ranks with a row of scalars or a summary."""
        return frozenset(frame.origin.rank for frame in self._numbers())

    def collections(self) -> Mapping[str, Contents]:
        """What there is of tensors."""
        found = {}
        for collection, frames in self._tensors.items():
            rows = dict.fromkeys(frame.rows for frame in frames)
            columns = dict.fromkeys((frame.columns, frame.count_columns) for frame in frames)
            found[collection] = Contents(
                tuple(dict.fromkeys(name for names in rows for name in names)),
                tuple(dict.fromkeys(name for each in columns for names in each for name in names)),
                frozenset(frame.step for frame in frames),
            )
        return found

    def statistic(
        self, collection: str, tensor: str, statistic: str, mode: Mode, rank: int
    ) -> Points:
        """One statistic or count of one tensor; empty where there is none."""
        steps, values, at_us = [], [], []
        places: dict[tuple[str, ...], list[int]] = {}
        for frame, column in self._columns(collection, statistic, mode, rank):
            if (here := places.get(frame.rows)) is None:
                here = [place for place, name in enumerate(frame.rows) if name == tensor]
                places[frame.rows] = here
            for place in here:
                steps.append(frame.step)
                values.append(column[place])
                at_us.append(frame.at_us)
        return joined(
            [Points(np.array(steps, np.int64), np.array(values, float), np.array(at_us, np.int64))]
        )

    def cells(self, collection: str, statistic: str, mode: Mode, rank: int) -> Cells:
        """One statistic or count of all tensors; empty where there is none."""
        names: dict[str, int] = {}
        numbers: dict[tuple[str, ...], Integers] = {}
        rows: list[Integers] = []
        steps: list[Integers] = []
        values: list[Reals] = []
        for frame, column in self._columns(collection, statistic, mode, rank):
            if (here := numbers.get(frame.rows)) is None:
                places = [names.setdefault(name, len(names)) for name in frame.rows]
                here = numbers[frame.rows] = np.array(places, np.int64)
            rows.append(here)
            steps.append(np.full(here.size, frame.step, np.int64))
            values.append(column)
        if not rows:
            return Cells((), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        return Cells(
            tuple(names), np.concatenate(rows), np.concatenate(steps), np.concatenate(values)
        )

    def nodes(self) -> frozenset[str]:
        """The nodes with samples."""
        return frozenset(frame.node for frame in self._system)

    def system(self, node: str) -> Samples:
        """All samples of a node; empty where there are none."""
        columns: dict[str, int] = {}
        names: list[Integers] = []
        at_us: list[Integers] = []
        values: list[Reals] = []
        for frame in self._system:
            if frame.node != node:
                continue
            here = [columns.setdefault(name, len(columns)) for name in frame.columns]
            names.append(np.tile(np.array(here, np.int64), frame.at_us.size))
            at_us.append(np.repeat(frame.at_us.astype(np.int64), len(here)))
            values.append(frame.values.ravel())
        if not names:
            return Samples((), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        return Samples(
            tuple(columns), np.concatenate(names), np.concatenate(at_us), np.concatenate(values)
        )

    def _columns(
        self, collection: str, statistic: str, mode: Mode, rank: int
    ) -> Iterator[tuple[TensorFrame, Reals]]:
        for frame in self._tensors.get(collection, ()):
            if frame.mode != mode or frame.origin.rank != rank:
                continue
            found = frame.column(statistic)
            counts = frame.count(statistic) if found is None else None
            if found is not None:
                yield frame, found.astype(np.float64)
            elif counts is not None:
                yield frame, counts.astype(np.float64)

    def _numbers(self) -> Iterator[StepFrame | TensorFrame]:
        yield from self._steps
        for frames in self._tensors.values():
            yield from frames
