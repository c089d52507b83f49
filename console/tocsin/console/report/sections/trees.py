"""Boosted trees: the importance of features and the depth of trees, as far as they were recorded.

The loss over the rounds is in the section on the training, labels and the confusion matrix in that
on predictions. Scores of single samples do not leave a training, so there is no ROC curve and no
distribution of residuals.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import Bar, Line, bar_chart, line_chart
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section
from tocsin.schemas.text import plain_line, share_text

KEY: Final = "trees"
_TITLE: Final = "Boosted trees"
_IMPORTANCE: Final = "feature_importance"
IMPORTANCES: Final = f"log.{_IMPORTANCE}."
"""How the scalars begin that are shown here."""
_KINDS: Final = ("weight", "gain", "cover", "total_gain", "total_cover")
_SHOWN: Final = 30


def trees(numbers: RunNumbers) -> Section | None:
    """None: the run has recorded neither importances nor trees."""
    charts, findings, figures = [], [], []
    for kind, values in importances(numbers).items():
        total = sum(values.values())
        if total <= 0:
            continue
        order = sorted(values, key=lambda name: (-values[name], name))
        bars = [Bar(name, 100 * values[name] / total) for name in order[:_SHOWN]]
        title = f"Importance of features{f' by {kind}' if kind else ''}"
        charts.append(bar_chart(bars, title=title, unit="percent"))
        top = share_text(sum(bar.value for bar in bars[:3]))
        findings.append(
            f"Of {len(values):,} features the three most important"
            f"{f' by {kind}' if kind else ''} have {top} %."
        )
        figures.append(Figure(f"features{f' by {kind}' if kind else ''}", len(values)))
    depth = _depth(numbers)
    if depth is not None:
        charts.append(line_chart([depth], title="Depth of the deepest new tree"))
        findings.append(f"The deepest tree has {int(np.nanmax(depth.y)):,} levels below its root.")
    if not charts:
        return None
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(findings), charts=charts, figures=figures,
        advice="Features without importance can be dropped; one that has almost all of it may leak "
        "the answer.",
    )  # fmt: skip


def importances(numbers: RunNumbers) -> dict[str, dict[str, float]]:
    """The newest importance of each feature, by kind (`weight`, `gain`, `cover`, or "")."""
    found: dict[str, dict[str, float]] = {}
    matrix = numbers.matrix(_IMPORTANCE, "importance")
    if matrix is not None:
        for name, row in zip(matrix.rows, matrix.values, strict=True):
            known = row[np.isfinite(row)]
            if known.size:
                found.setdefault("", {})[plain_line(name)] = max(float(known[-1]), 0.0)
    for scalar in numbers.run.scalars():
        if not scalar.startswith(IMPORTANCES):
            continue
        name = scalar.removeprefix(IMPORTANCES)
        first, _, rest = name.partition(".")
        kind, feature = (first, rest) if first in _KINDS and rest else ("", name)
        series = numbers.series(scalar)
        if series is not None and np.isfinite(series.values).any():
            last = float(series.values[np.isfinite(series.values)][-1])
            found.setdefault(kind, {})[plain_line(feature)] = max(last, 0.0)
    return found


def _depth(numbers: RunNumbers) -> Line | None:
    matrix = numbers.matrix("trees", "depth")
    if matrix is not None and np.isfinite(matrix.values).any():
        deepest = np.fmax.reduce(matrix.values, axis=0)
        return Line.from_values("depth", matrix.steps, deepest, missing=True)
    series = numbers.series("log.tree_depth")
    if series is None or not np.isfinite(series.values).any():
        return None
    return Line.from_values("depth", series.steps, series.values)
