"""Layers over the steps: gradients, updates, activations, as maps of heat."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import heat_map, value_text
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.shared import step_marks
from tocsin.schemas.text import counted
from tocsin.store import Matrix

KEY: Final = "tensors"
_TITLE: Final = "Layers"
_MAPS: Final = (
    ("gradients", "l2", "Norm of the gradients, by tensor", True),
    ("updates", "update_l2", "Norm of the updates, by tensor", True),
    ("activations", "dead", "Share of dead units, by module", None),
    ("activations", "saturated", "Share of saturated values, by module", None),
)


def tensors(numbers: RunNumbers) -> Section:
    """Where in the model something happens; the largest and the smallest gradients by name."""
    charts, figures, findings = [], [], []
    marks = step_marks(numbers)
    for collection, statistic, title, logarithmic in _MAPS:
        matrix = numbers.matrix(collection, statistic)
        if matrix is None or not matrix.present.any():
            continue
        charts.append(
            heat_map(
                matrix.rows, matrix.steps, matrix.values, title=title, marks=marks,
                logarithmic=logarithmic,
            )
        )  # fmt: skip
        if (collection, statistic) == ("gradients", "l2"):
            findings.append(_gradients(matrix))
            figures.append(Figure("tensors with gradients", len(matrix.rows)))
    if not charts:
        return not_captured(
            KEY, _TITLE, "No statistics of tensors were captured.",
            "`capture: {collections: {gradients: {every: 10}}}` captures the gradients each ten "
            "steps, the default where the budget allows it.",
        )  # fmt: skip
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(findings) or "See the maps.", charts=charts,
        figures=figures,
    )  # fmt: skip


def _gradients(matrix: Matrix) -> str:
    norms = np.array(
        [
            float(np.median(row[np.isfinite(row)])) if np.isfinite(row).any() else np.nan
            for row in matrix.values
        ]
    )
    if not np.isfinite(norms).any():
        return "No norm of a gradient was finite."
    high, low = int(np.nanargmax(norms)), int(np.nanargmin(norms))
    return (
        f"{counted(len(matrix.rows), 'tensor')} with gradients, measured "
        f"{counted(int(matrix.steps.size), 'time')}. The median norm is largest for "
        f"{matrix.rows[high]} ({value_text(float(norms[high]))}) and smallest for "
        f"{matrix.rows[low]} ({value_text(float(norms[low]))})."
    )
