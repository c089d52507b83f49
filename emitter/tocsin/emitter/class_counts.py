"""How often each class was the label and the prediction, and what was taken for what.

Counted on the host, from samples of ids. All counts are of what was looked at since they were last
sent; a rule that wants more adds them up.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.emitter.tables import Table

Ids = npt.NDArray[np.int64]

MAX_CLASSES: Final = 1000
"""Classes of which each is counted. Targets of more are tokens: `tocsin.emitter.token_shares`."""

MAX_CONFUSION: Final = 100
"""Classes up to which it is counted which was taken for which."""

FEWEST_PAIRS: Final = 4


class ClassCounts:
    """Counts of one mode. `classes` grows with the largest id unless the scores have told it."""

    def __init__(self) -> None:
        self._looks: list[tuple[Ids, Ids | None]] = []
        self._classes = 0

    def __bool__(self) -> bool:
        return bool(self._looks)

    def add(self, labels: Ids, predictions: Ids | None, classes: int) -> None:
        """A sample: ids of true and of predicted classes, in pairs. Ids outside are left out.

        `classes` is how many there are, 0 where only the ids tell.
        """
        if len(labels) >= FEWEST_PAIRS and bool((np.diff(labels) == 1).all()):
            return  # who belongs to whom within a batch, as in contrastive learning: no classes
        known = classes or int(labels.max(initial=-1)) + 1
        if predictions is not None and not classes:
            known = max(known, int(predictions.max(initial=-1)) + 1)
        self._classes = max(self._classes, min(known, MAX_CLASSES))
        self._looks.append((labels, predictions))

    def take(self) -> list[Table]:
        """The counts as tables `labels` and, with predictions, `confusion`; they begin at zero."""
        looks, self._looks = self._looks, []
        classes = self._classes
        if not looks or not classes:
            return []
        names = tuple(str(i) for i in range(classes))
        counted = np.zeros((classes, 3), np.uint64)
        confusion = np.zeros(classes * classes if classes <= MAX_CONFUSION else 0, np.uint64)
        predicted = False
        for labels, predictions in looks:
            good = (labels >= 0) & (labels < classes)
            if predictions is not None:
                predicted = True
                good &= (predictions >= 0) & (predictions < classes)
                right = predictions[good]
                counted[:, 1] += _counts(right, classes)
                counted[:, 2] += _counts(right[right == labels[good]], classes)
                if len(confusion):
                    confusion += _counts(labels[good] * classes + right, classes * classes)
            counted[:, 0] += _counts(labels[good], classes)
        columns = ("labels", "predictions", "hits") if predicted else ("labels",)
        tables = [
            Table(
                "labels",
                names,
                np.zeros((classes, 0), np.float32),
                counted[:, : len(columns)].copy(),
                columns=(),
                count_columns=columns,
            )
        ]
        if predicted and len(confusion):
            tables.append(
                Table(
                    "confusion",
                    names,
                    np.zeros((classes, 0), np.float32),
                    confusion.reshape(classes, classes),
                    columns=(),
                    count_columns=names,
                )
            )
        return tables


def _counts(ids: Ids, n: int) -> npt.NDArray[np.uint64]:
    return np.bincount(ids, minlength=n).astype(np.uint64)
