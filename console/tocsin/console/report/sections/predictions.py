"""Labels and predictions: their distribution, the confusion matrix, precision and recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tocsin.console.charts import Bar, Line, bar_chart, heat_map, line_chart
from tocsin.console.report.numbers import Floats, RunNumbers
from tocsin.console.report.section import Figure, Section, Table
from tocsin.schemas.records.collections import Mode
from tocsin.schemas.text import plain_line, share_text

KEY: Final = "predictions"
_TITLE: Final = "Labels and predictions"
_CLASSES: Final = 40


@dataclass(frozen=True, slots=True, eq=False)
class Confusion:
    """How often each class was predicted as each other one.

    Attributes:
        classes: ids, as their rows are called.
        counts: float64[true, predicted].
        steps: int64[looks]; `accuracy` float64[classes, looks], NaN without labels.
    """

    classes: Sequence[str]
    counts: Floats
    steps: np.ndarray[tuple[int], np.dtype[np.int64]]
    accuracy: Floats

    def scores(self) -> list[tuple[str, float, float, float]]:
        """Precision, recall and F1: micro, macro, and weighted by the labels; shares."""
        right = np.diag(self.counts)
        labels, predicted = self.counts.sum(axis=1), self.counts.sum(axis=0)
        with np.errstate(all="ignore"):
            precision = np.nan_to_num(right / predicted)
            recall = np.nan_to_num(right / labels)
            f1 = np.nan_to_num(2 * precision * recall / (precision + recall))
        total = float(labels.sum())
        micro = float(right.sum()) / total if total else 0.0
        seen = labels > 0
        macro = [float(v[seen].mean()) if seen.any() else 0.0 for v in (precision, recall, f1)]
        shares = labels / total if total else labels
        weighted = [float((v * shares).sum()) for v in (precision, recall, f1)]
        return [
            ("micro", micro, micro, micro),
            ("macro", macro[0], macro[1], macro[2]),
            ("weighted by labels", weighted[0], weighted[1], weighted[2]),
        ]


def predictions(numbers: RunNumbers) -> Section | None:
    """What the last evaluation has shown, else the training's samples; None: it has no classes."""
    mode: Mode = "eval" if numbers.matrix("labels", "labels", "eval") is not None else "train"
    labels = numbers.matrix("labels", "labels", mode)
    confusion = read_confusion(numbers, mode)
    if labels is None and confusion is None:
        return None
    of = "the last evaluation" if mode == "eval" else "samples of the last training batches"
    charts, tables, figures, findings = [], [], [], [f"Numbers are of {of}."]
    if labels is not None:
        last = np.array([_last(row) for row in labels.values])
        names = [plain_line(name) for name in labels.rows]
        bars = [Bar(n, v) for n, v in zip(names[:_CLASSES], last, strict=False)]
        charts.append(bar_chart(bars, title="Labels by class"))
        if last.sum() > 0:
            top = int(last.argmax())
            share = share_text(100 * float(last[top]) / float(last.sum()))
            findings.append(f"The most frequent class is {names[top]}, {share} % of the labels.")
    if confusion is not None:
        accuracy = 100 * float(np.trace(confusion.counts)) / (float(confusion.counts.sum()) or 1.0)
        findings.append(f"{share_text(accuracy)} % of the labels were predicted correctly.")
        figures.append(Figure("accuracy", accuracy, "percent"))
        charts.append(_matrix_chart(confusion))
        charts.append(
            line_chart(
                [
                    Line.from_values(name, confusion.steps, 100 * row, missing=True)
                    for name, row in zip(confusion.classes[:8], confusion.accuracy, strict=False)
                ],
                title="Accuracy by class", unit="percent",
            )
        )  # fmt: skip
        tables += [_scores(confusion), _pairs(confusion)]
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(findings), charts=charts, tables=tables,
        figures=figures,
    )  # fmt: skip


def read_confusion(numbers: RunNumbers, mode: Mode) -> Confusion | None:
    """The newest counts of each pair of classes; None: not captured."""
    collection = numbers.run.collections().get("confusion")
    first = numbers.matrix("confusion", collection.tensors[0], mode) if collection else None
    if collection is None or first is None:
        return None
    classes = list(first.rows)
    counts = np.zeros((len(classes), len(classes)))
    right = np.full((len(classes), first.steps.size), np.nan)
    total = np.zeros((len(classes), first.steps.size))
    for column, predicted in enumerate(classes):
        matrix = numbers.matrix("confusion", predicted, mode)
        if matrix is None or not np.array_equal(matrix.steps, first.steps):
            continue
        place = {name: row for row, name in enumerate(matrix.rows)}
        for row, true in enumerate(classes):
            if true in place:
                values = matrix.values[place[true]]
                counts[row, column] = _last(values)
                total[row] += np.nan_to_num(values)
                if true == predicted:
                    right[row] = values
    with np.errstate(all="ignore"):
        accuracy = np.where(total > 0, np.nan_to_num(right) / total, np.nan)
    return Confusion(classes, counts, first.steps, accuracy)


def _matrix_chart(confusion: Confusion) -> str:
    shown = confusion.counts[:_CLASSES, :_CLASSES]
    with np.errstate(all="ignore"):
        shares = 100 * shown / shown.sum(axis=1, keepdims=True)
    return heat_map(
        [f"true {name}" for name in confusion.classes[:_CLASSES]],
        np.arange(shown.shape[1]), shares, unit="percent", limits=(0, 100),
        x_name="predicted class, by its place", title="Confusion matrix, shares of a row",
    )  # fmt: skip


def _scores(confusion: Confusion) -> Table:
    rows = [
        (name, *(f"{share_text(100 * value)} %" for value in values))
        for name, *values in confusion.scores()
    ]
    columns = ("average", "precision", "recall", "F1")
    return Table(columns, rows, "Evaluation of the confusion matrix", frozenset({1, 2, 3}))


def _pairs(confusion: Confusion) -> Table:
    """The classes that are mistaken for others most often."""
    wrong = confusion.counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:10]
    rows = []
    for place in order:
        true, predicted = divmod(int(place), wrong.shape[1])
        if wrong[true, predicted] > 0:
            rows.append(
                (
                    plain_line(confusion.classes[true]), plain_line(confusion.classes[predicted]),
                    f"{int(wrong[true, predicted]):,}",
                )
            )  # fmt: skip
    columns = ("true class", "predicted as", "times")
    return Table(columns, rows, "Most frequent mistakes", frozenset({2}))


def _last(row: Floats) -> float:
    known = row[np.isfinite(row)]
    return float(known[-1]) if known.size else 0.0
