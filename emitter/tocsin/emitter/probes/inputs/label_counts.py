"""How often each class was the label and the prediction, and what was taken for what.

Counted on the host, from samples of ids. All counts are of what was looked at since they were last
sent; a rule that wants more adds them up.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import Counts

Ids = npt.NDArray[np.int64]

MAX_CLASSES: Final = 1000
"""Classes of which each is counted. Targets of more are tokens: see `token_counts`."""

MAX_CONFUSION: Final = 100
"""Classes up to which it is counted which was taken for which."""

FEWEST_PAIRS: Final = 4


MAX_UNCOUNTED: Final = 32
"""Samples that are kept as they came; then they are counted."""


class LabelCounts:
    """Counts of one mode. How many classes there are the scores tell, else the largest id."""

    def __init__(self) -> None:
        self._looks: list[tuple[Ids, Ids | None]] = []
        self._classes = 0
        self._reset()

    def _reset(self) -> None:
        self._counted = np.zeros((0, 3), np.uint64)
        self._confusion = np.zeros((0, 0), np.uint64)
        self._predicted = False

    def __bool__(self) -> bool:
        return bool(self._looks) or bool(self._counted.any())

    def add(self, labels: Ids, predictions: Ids | None, classes: int) -> None:
        """A sample: ids of true and of predicted classes, in pairs, each `[n]`. Ids outside are
        left out.

        `classes` is how many there are, 0 where only the ids tell.
        """
        if len(labels) >= FEWEST_PAIRS and bool((np.diff(labels) == 1).all()):
            return  # who belongs to whom within a batch, as in contrastive learning: no classes
        known = classes or int(labels.max(initial=-1)) + 1
        if predictions is not None and not classes:
            known = max(known, int(predictions.max(initial=-1)) + 1)
        self._classes = max(self._classes, min(known, MAX_CLASSES))
        self._looks.append((labels, predictions))
        if len(self._looks) >= MAX_UNCOUNTED:
            self._count()

    def drain(self) -> list[Table]:
        """The counts as tables `labels` and, with predictions, `confusion`; they begin at zero."""
        self._count()
        classes, counted = len(self._counted), self._counted
        if not counted.any():
            return []
        names = tuple(str(i) for i in range(classes))
        columns = ("labels", "predictions", "hits") if self._predicted else ("labels",)
        tables = [_table("labels", names, counted[:, : len(columns)], columns)]
        if self._predicted and classes <= MAX_CONFUSION:
            tables.append(_table("confusion", names, self._confusion, names))
        self._reset()
        return tables

    def _count(self) -> None:
        looks, self._looks = self._looks, []
        classes = self._classes
        if not looks or not classes:
            return
        more = classes - len(self._counted)
        if more:
            self._counted = np.pad(self._counted, ((0, more), (0, 0)))
            if classes <= MAX_CONFUSION:
                self._confusion = np.pad(self._confusion, ((0, more), (0, more)))
        counted = self._counted
        for labels, predictions in looks:
            good = (labels >= 0) & (labels < classes)
            if predictions is not None:
                self._predicted = True
                good &= (predictions >= 0) & (predictions < classes)
                taken_for = predictions[good]
                counted[:, 1] += _counts(taken_for, classes)
                counted[:, 2] += _counts(taken_for[taken_for == labels[good]], classes)
                if classes <= MAX_CONFUSION:
                    pairs = _counts(labels[good] * classes + taken_for, classes * classes)
                    self._confusion += pairs.reshape(classes, classes)
            counted[:, 0] += _counts(labels[good], classes)


def _table(
    collection: str, names: tuple[str, ...], counts: Counts, columns: tuple[str, ...]
) -> Table:
    nothing = np.zeros((len(names), 0), np.float32)
    return Table(collection, names, nothing, counts.copy(), columns=(), count_columns=columns)


def _counts(ids: Ids, n: int) -> Counts:
    return np.bincount(ids, minlength=n).astype(np.uint64)
