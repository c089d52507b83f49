"""Parts of a model: which rank's summaries are read for which names.

Under data parallelism the ranks' summaries have the same names, and those of the lowest rank are
enough. Under pipeline and tensor parallelism and FSDP each rank has names of its own. A rank is
read as far as it has names that no lower one has; one that has not sent for long is passed over,
and names that it had are read elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.stream_rules.reading.state_codec import StateArray

MAX_SIZE: Final = 450_000
"""What may be read of the names of one collection, over all ranks: the bytes of each name in JSON
and `NAME_SIZE`, and `RANK_SIZE` for each rank. A rank beyond it is not read; the lowest one is in
any case. The largest state of a rule then fits into one record of the bus: `unchanged_tensor` keeps
four lists of names, and ten numbers for each."""

NAME_SIZE: Final = 45
RANK_SIZE: Final = 600

MAX_COLUMNS: Final = 256
"""Scalars of one mode of which it is remembered whose frames all parts are given."""

KEPT_STEPS: Final = 10
"""Summaries after which a name that a rank has no more may be read of another."""

SILENT_STEPS: Final = 1_000
"""Steps without a summary after which a rank is passed over, at the least; else ten times the
longest pause between two of its summaries."""

_PAUSES: Final = 10

Names = npt.NDArray[np.uint64]
_Cached = Annotated[dict[str, dict[int, StateArray]], Field(exclude=True)]
_CachedRanks = Annotated[frozenset[int] | None, Field(exclude=True)]


def _none() -> Names:
    return np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class _Hashed:
    """Names as sorted numbers, and the size of each."""

    names: Names
    sizes: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Held:
    """What a rank has of a collection: names of late, and of the summaries before those."""

    names: StateArray = field(default_factory=_none)
    before: StateArray = field(default_factory=_none)
    summaries: int = 0
    last_step: int = -1
    pause: int = 0
    size: int = 0
    size_before: int = 0

    def all(self) -> Names:
        return np.union1d(self.names, self.before) if len(self.before) else self.names

    def full_size(self) -> int:
        return RANK_SIZE + max(self.size, self.size_before)

    def is_silent(self, step: int) -> bool:
        return step - self.last_step > max(SILENT_STEPS, _PAUSES * self.pause)

    def add(self, hashed: _Hashed, step: int) -> bool:
        """Whether that has changed which names it has."""
        changed = False
        if step > self.last_step:
            if self.last_step >= 0:
                self.pause = max(self.pause, step - self.last_step)
            self.last_step = step
            self.summaries += 1
            if self.summaries > KEPT_STEPS:
                changed = not _within(self.before, self.names)
                self.names, self.before, self.summaries = _none(), self.names, 1
                self.size, self.size_before = 0, self.size
        new = ~_among(hashed.names, self.names)
        if new.any():
            changed |= not _within(hashed.names[new], self.before)
            self.names = np.union1d(self.names, hashed.names)
            self.size += int(hashed.sizes[new].sum())
        return changed


@dataclass(slots=True)
class Parts:
    """The ranks of a run that are read, by mode and collection.

    `refused` are ranks that were read and then had too many names. `leads`: by mode and column of
    scalars, the lowest rank that has it. The rest is derived, and no part of a snapshot.
    """

    held: dict[str, dict[int, _Held]] = field(default_factory=dict)
    refused: dict[str, list[int]] = field(default_factory=dict)
    leads: dict[str, dict[str, int]] = field(default_factory=dict)
    covered: _Cached = field(default_factory=dict)
    read: _CachedRanks = None

    def reads(self, frame: TensorFrame) -> bool:
        """Whether this summary, or part of one, is to be read: it has a name of its own."""
        if frame.origin.world_size <= 1 and not self.held:
            return True
        kind = f"{frame.mode}|{frame.collection}"
        ranks = self.held.setdefault(kind, {})
        rank, hashed = frame.origin.rank, _hashed(frame.rows)
        for other in [r for r, held in ranks.items() if r != rank and held.is_silent(frame.step)]:
            self._drop(kind, other)
        own, lowest = ranks.get(rank), not ranks or rank <= min(ranks)
        if not lowest and _within(hashed.names, self._covered(kind, rank)):
            if own is not None and _within(own.all(), self._covered(kind, rank)):
                self._drop(kind, rank)
            return False
        if own is None:
            if not lowest:
                size = RANK_SIZE + frame.parts * int(hashed.sizes.sum())
                total = sum(held.full_size() for held in ranks.values())
                if rank in self.refused.get(kind, ()) or total + size > MAX_SIZE:
                    return False
            own = ranks[rank] = _Held()
            self.read = None
        if own.add(hashed, frame.step):
            self._changed(kind, rank)
            self._leave_out(kind, rank)
        return rank in ranks

    def ranks(self) -> frozenset[int]:
        """All that are read."""
        if self.read is None:
            self.read = frozenset(rank for ranks in self.held.values() for rank in ranks)
        return self.read

    def leads_with(self, frame: StepFrame) -> bool:
        """Whether a frame of scalars concerns all parts: no lower rank has one of its columns."""
        if frame.origin.world_size <= 1:
            return True
        leads, rank, found = self.leads.setdefault(frame.mode, {}), frame.origin.rank, False
        for column in frame.columns:
            lead = leads.get(column)
            if lead is None and len(leads) >= MAX_COLUMNS:
                continue
            if lead is None or rank <= lead:
                leads[column], found = rank, True
        return found

    def _drop(self, kind: str, rank: int) -> None:
        del self.held[kind][rank]
        self._changed(kind, rank)
        self.read = None

    def _changed(self, kind: str, rank: int) -> None:
        """Forget what was derived from the names of a rank."""
        covered = self.covered.get(kind, {})
        for other in [r for r in covered if r > rank]:
            del covered[other]

    def _covered(self, kind: str, rank: int) -> Names:
        """The names of all lower ranks that are read."""
        cached, ranks = self.covered.setdefault(kind, {}), self.held[kind]
        found = cached.get(rank)
        if found is None:
            start = max((r for r in cached if r < rank), default=-1)
            between = [held.all() for r, held in ranks.items() if start <= r < rank]
            known = [cached[start]] if start >= 0 else []
            found = np.unique(np.concatenate([*known, *between])) if between or known else _none()
            if rank in ranks:
                cached[rank] = found
        return found

    def _leave_out(self, kind: str, rank: int) -> None:
        """Drop this and higher ranks as far as they have nothing that lower ones have not, or are
        too much together with those."""
        ranks = self.held[kind]
        lowest = min(ranks)
        size = sum(held.full_size() for r, held in ranks.items() if r < rank)
        for other in sorted(r for r in ranks if r >= rank):
            size += ranks[other].full_size()
            too_much = other != lowest and size > MAX_SIZE
            if too_much:
                self.refused[kind] = sorted({*self.refused.get(kind, ()), other})
            elif other == lowest or not _within(ranks[other].all(), self._covered(kind, other)):
                continue
            size -= ranks[other].full_size()
            self._drop(kind, other)


def _among(names: Names, known: Names) -> npt.NDArray[np.bool_]:
    """Which of the names are known; `known` is sorted."""
    if not len(known):
        return np.zeros(len(names), bool)
    places = np.minimum(np.searchsorted(known, names), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[places] == names
    return found


def _within(names: Names, known: Names) -> bool:
    return bool(_among(names, known).all())


@lru_cache(maxsize=512)
def _hashed(rows: tuple[str, ...]) -> _Hashed:
    """The names as numbers, the same in each process."""
    hashes = [int.from_bytes(blake2b(row.encode(), digest_size=8).digest()) for row in rows]
    found, first = np.unique(np.array(hashes, np.uint64), return_index=True)
    sizes = np.array([len(json.dumps(row)) + NAME_SIZE for row in rows], np.int64)[first]
    return _Hashed(found, sizes)
