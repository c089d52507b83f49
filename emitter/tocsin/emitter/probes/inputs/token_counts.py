"""How often each token comes, of a vocabulary too large to count each."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.emitter.probes.inputs.label_counts import Ids
from tocsin.emitter.statistics.arrays import narrowed
from tocsin.emitter.statistics.tables import Table

TOP: Final = 64
"""Tokens that have a row of their own; those of the last, `other`, are the rest."""

OTHER: Final = "other"


MAX_UNCOUNTED: Final = 32
"""Samples that are kept as they came; then they are counted."""

MAX_KNOWN: Final = 1 << 18
"""Different tokens that are counted; of more, the rarest are among the rest."""


class TokenCounts:
    """Counts of one mode, from samples of ids, since they were last sent."""

    def __init__(self) -> None:
        self._looks: list[Ids] = []
        self._reset()

    def _reset(self) -> None:
        self._ids = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._total = 0

    def __bool__(self) -> bool:
        return bool(self._looks) or self._total > 0

    def add(self, ids: Ids) -> None:
        """A sample of ids, `[n]`; ids below zero (left out of the loss) are no tokens."""
        self._looks.append(ids[ids >= 0])
        if len(self._looks) >= MAX_UNCOUNTED:
            self._count()

    def drain(self) -> list[Table]:
        """The most frequent as a table `tokens`: `share` from 0 to 1, and `count`."""
        self._count()
        if not self._total:
            return []
        order = np.lexsort((self._ids, -self._counts))[:TOP]
        names = [str(i) for i in self._ids[order]]
        kept = [int(n) for n in self._counts[order]]
        rest = self._total - sum(kept)
        if rest:
            names.append(OTHER)
            kept.append(rest)
        found = np.asarray(kept, np.uint64).reshape(-1, 1)
        shares = narrowed(found / self._total)
        self._reset()
        return [Table("tokens", tuple(names), shares, found, ("share",), ("count",))]

    def _count(self) -> None:
        looks, self._looks = self._looks, []
        if not looks:
            return
        ids, counts = np.unique(np.concatenate(looks), return_counts=True)
        self._total += int(counts.sum())
        known, place = np.unique(np.concatenate((self._ids, ids)), return_inverse=True)
        both = np.concatenate((self._counts, counts.astype(np.int64)))
        total = np.zeros(len(known), np.int64)
        np.add.at(total, place, both)
        if len(known) > MAX_KNOWN:
            kept = np.sort(np.argpartition(-total, MAX_KNOWN)[:MAX_KNOWN])
            known, total = known[kept], total[kept]
        self._ids, self._counts = known, total
