"""How often each token comes, of a vocabulary too large to count each."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.emitter.class_counts import Ids
from tocsin.emitter.tables import Table

TOP: Final = 64
"""Tokens that have a row of their own; those of the last, `other`, are the rest."""

OTHER: Final = "other"


class TokenShares:
    """Counts of one mode, from samples of ids, since they were last sent."""

    def __init__(self) -> None:
        self._looks: list[Ids] = []

    def __bool__(self) -> bool:
        return bool(self._looks)

    def add(self, ids: Ids) -> None:
        """A sample; ids below zero (left out of the loss) are no tokens."""
        self._looks.append(ids[ids >= 0])

    def take(self) -> list[Table]:
        """The most frequent as a table `tokens`: `share` from 0 to 1, and `count`."""
        looks, self._looks = self._looks, []
        ids, counts = np.unique(
            np.concatenate(looks or [np.zeros(0, np.int64)]), return_counts=True
        )
        total = int(counts.sum())
        if not total:
            return []
        order = np.lexsort((ids, -counts))[:TOP]
        names = [str(i) for i in ids[order]]
        kept = [int(n) for n in counts[order]]
        if len(ids) > TOP:
            names.append(OTHER)
            kept.append(total - sum(kept))
        found = np.asarray(kept, np.uint64).reshape(-1, 1)
        return [
            Table(
                "tokens",
                tuple(names),
                (found / total).astype(np.float32),
                found,
                columns=("share",),
                count_columns=("count",),
            )
        ]
