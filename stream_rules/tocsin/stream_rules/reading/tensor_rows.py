"""One collection of a run: the summaries of one rank, whole.

A summary that was split for its size is put together again; one of which a part was lost is left
out. `tocsin.stream_rules.reading.rank_parts` decides which rank; where a rule reads several, the
lowest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.reading.state_codec import StateArray

Doubles = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Parts:
    rows: list[str]
    values: StateArray
    counts: StateArray
    part: int


@dataclass(slots=True)
class LowestRankRows:
    """Which rank leads, how far it is, and the parts of a step that have come."""

    rank: int | None = None
    last_step: int = -1
    parts: list[_Parts] = field(default_factory=list)

    def assemble(self, frame: TensorFrame) -> TensorFrame | None:
        """The whole summary that this frame completes; None: not yet, not new, or not its turn."""
        rank = frame.origin.rank
        if self.rank is not None and rank > self.rank:
            return None
        if rank != self.rank:
            self.rank, self.last_step, self.parts = rank, -1, []
        if frame.step <= self.last_step and not (self.parts and frame.step == self.last_step):
            return None
        if frame.parts == 1:
            self.last_step, self.parts = frame.step, []
            return frame
        if frame.step > self.last_step:
            self.last_step, self.parts = frame.step, []
        if frame.part != len(self.parts):
            self.parts = []
            return None
        self.parts.append(_Parts(list(frame.rows), frame.values, frame.counts, frame.part))
        if len(self.parts) < frame.parts:
            return None
        parts, self.parts = self.parts, []
        return replace(
            frame,
            part=0,
            parts=1,
            rows=tuple(name for part in parts for name in part.rows),
            values=np.concatenate([part.values for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
        )


def reset_ranks(state: object) -> None:
    """Let all `LowestRankRows` in a rule's state begin with another rank."""
    if isinstance(state, LowestRankRows):
        state.rank, state.last_step, state.parts = None, -1, []
    elif isinstance(state, dict):
        for value in state.values():
            reset_ranks(value)
    elif is_dataclass(state):
        for one in fields(state):
            reset_ranks(getattr(state, one.name))


def doubles(table: TensorFrame, column: str) -> Doubles:
    """A statistic of all rows that the table has. Raises KeyError: it has not."""
    values = table.column(column)
    if values is None:
        raise KeyError(column)
    return values.astype(np.float64)


def mean_abs(frame: TensorFrame) -> Doubles | None:
    """The mean absolute value of each row's finite values; None: it was not captured.

    NaN for a row without any: no number is not a small one.
    """
    total, finite = frame.column("l1"), finite_numel(frame)
    if total is None or finite is None:
        return None
    with np.errstate(all="ignore"):
        return np.where(finite > 0, total.astype(np.float64) / finite, np.nan)


def finite_numel(frame: TensorFrame) -> Doubles | None:
    """How many values of each row are finite; None: it was not captured."""
    numel = frame.count("numel")
    if numel is None:
        return None
    finite = numel.astype(np.float64)
    for name in ("nans", "infs"):
        bad = frame.count(name)
        if bad is not None:
            finite -= bad
    return finite


def aligned(names: Sequence[str], known: Sequence[str], values: Doubles) -> Doubles:
    """`values` of the rows `known`, in the order of `names`; NaN where there is none."""
    if names is known:
        return values
    names, known = tuple(names), tuple(known)
    if names == known:
        return values
    if not known:
        return np.full(len(names), np.nan)
    index = places(names, known)
    return np.where(index >= 0, values[np.maximum(index, 0)], np.nan)


@lru_cache(maxsize=64)
def places(names: tuple[str, ...], known: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Where in `known` each of the names stands; -1 where it does not.

    Kept, because the same two tables, like gradients in backward and weights in forward order,
    come again with every summary.
    """
    at = {name: i for i, name in enumerate(known)}
    index = np.array([at.get(name, -1) for name in names], np.int64)
    index.setflags(write=False)
    return index


@dataclass(slots=True)
class MarkedRows:
    """Some rows of a table of names: those at which `on` is true."""

    rows: tuple[str, ...] = ()
    on: StateArray = field(default_factory=lambda: np.zeros(0, bool))

    def among(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which of the names are marked; one that is not in the table is not."""
        return aligned(names, self.rows, self.on.astype(np.float64)) > 0


def is_asked_for(collection: str, row: str, patterns: Iterable[str]) -> bool:
    """Whether a COLLECTION/NAME pattern names it, with its place in the mesh (`@tp1`) or without.

    `*` and `?` stand for any characters.
    """
    names = {f"{collection}/{row}", f"{collection}/{row.partition('@')[0]}"}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def rows_asked_for(table: TensorFrame, patterns: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Which rows of a table COLLECTION/NAME patterns name."""
    asked = (is_asked_for(table.collection, name, patterns) for name in table.rows)
    return np.fromiter(asked, bool, len(table.rows))


def named(rows: Sequence[str], chosen: Iterable[int], limit: int = 32) -> tuple[str, ...]:
    """The names of some rows, the first ones."""
    return tuple(rows[i] for i in list(chosen)[:limit])
