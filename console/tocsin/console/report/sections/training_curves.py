"""Loss, evaluation, learning rate and norm of the gradients, with the issues marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np

from tocsin.console.charts import Line, line_chart, value_text
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.shared import step_marks
from tocsin.console.report.sections.trees import IMPORTANCES
from tocsin.schemas.text import counted
from tocsin.store import Series

_MAX_LINES: Final = 6
_MAX_OWN: Final = 30
"""Charts of what the user logs."""


def training_curves(numbers: RunNumbers) -> Section:
    """What the training has learned: the section that people look at first."""
    title = "Training"
    loss, evaluation = numbers.series("loss"), _evaluation(numbers)
    if loss is None and evaluation is not None:
        chart = line_chart([evaluation], title="Loss in evaluation", marks=step_marks(numbers))
        return Section(
            key="training", title=title, charts=[chart],
            finding=f"No loss of the training was captured. {_evaluations_text(evaluation)}",
        )  # fmt: skip
    if loss is None:
        return not_captured(
            "training", title, "No loss was captured.",
            "tocsin reads the loss at `loss.backward()`. For another framework, report it: "
            '`run.log({"loss": value})`.',
        )  # fmt: skip
    marks = step_marks(numbers)
    losses = [_line("loss", loss), *_named(numbers, "loss.")]
    charts = [
        line_chart(
            losses, title="Loss", marks=marks,
            description="The loss of the training over its steps",
        )
    ]  # fmt: skip
    if evaluation is not None:
        charts.append(
            line_chart(
                [_line("training", loss), evaluation], title="Loss in training and evaluation",
                marks=marks,
            )
        )  # fmt: skip
    norm = numbers.series("gradient_norm") or numbers.series("gradient_norm_sampled")
    if norm is not None:
        charts.append(
            line_chart([_line(norm.name, norm)], title="Norm of the gradients", marks=marks)
        )
    rates = _named(numbers, "lr.")
    if rates:
        charts.append(line_chart(rates, title="Learning rate", marks=marks, height=180))
    own, more = _own(numbers)
    charts += [line_chart([line], title=line.name, marks=marks, height=180) for line in own]
    finding = _finding(loss, evaluation, _whose(numbers))
    if more:
        finding += f" {counted(more, 'scalar')} more that you log: `tocsin query` shows them."
    return Section(
        key="training", title=title, finding=finding,
        status="warning" if not np.isfinite(loss.values).all() else "plain",
        figures=_figures(loss), charts=charts,
    )  # fmt: skip


def _line(name: str, series: Series) -> Line:
    return Line.from_values(name, series.steps, series.values)


def _named(numbers: RunNumbers, prefix: str) -> list[Line]:
    return _lines(numbers, [one for one in numbers.run.scalars() if one.startswith(prefix)])


def _own(numbers: RunNumbers) -> tuple[list[Line], int]:
    """What the user logs, and how many more; without importances of features, which have a section
    of their own."""
    names = [
        name
        for name in numbers.run.scalars()
        if name.startswith("log.") and not name.startswith(IMPORTANCES)
    ]
    lines = _lines(numbers, names, _MAX_OWN)
    return lines, len(names) - len(lines)


def _lines(numbers: RunNumbers, names: Sequence[str], limit: int = _MAX_LINES) -> list[Line]:
    """The first of them that this rank has; each is a question to the store."""
    found = (
        _line(name.removeprefix("log."), series)
        for name in names
        if (series := numbers.series(name)) is not None
    )
    return list(islice(found, limit))


def _evaluation(numbers: RunNumbers) -> Line | None:
    """The mean loss of each evaluation, at the last step of training before it."""
    series = numbers.series("loss", mode="eval")
    if series is None:
        return None
    steps, places = np.unique(series.steps, return_inverse=True)
    finite = np.isfinite(series.values)
    total = np.bincount(places, np.where(finite, series.values, 0), steps.size)
    count = np.bincount(places, finite, steps.size)
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return Line.from_values("evaluation", steps, means)


def _whose(numbers: RunNumbers) -> str:
    """Of several ranks each has a loss of its own: of its part of the batch."""
    ranks = len(numbers.run.ranks())
    return "" if ranks < 2 else f" on rank {numbers.first_rank:,}, one of {ranks:,}"


def _finding(loss: Series, evaluation: Line | None, whose: str) -> str:
    finite = np.isfinite(loss.values)
    count = _span(loss) + whose
    if not finite.any():
        return f"The loss was never finite in {count}."
    shown = loss.values[finite]
    first, last = _ends(shown)
    went = f"went from {value_text(first)} to {value_text(last)}"
    found = [f"The loss {went if shown.size > 1 else f'was {value_text(last)}'} in {count}."]
    if not finite.all():
        at = int(loss.steps[~finite][0])
        found.append(
            f"It was NaN or infinite at {counted(int((~finite).sum()), 'step')}, "
            f"first at step {at:,}."
        )
    if evaluation is not None:
        found.append(_evaluations_text(evaluation))
    return " ".join(filter(None, found))


def _span(loss: Series) -> str:
    """Over how many steps it was captured, and at how many of them if not at each."""
    steps, losses = int(loss.steps[-1] - loss.steps[0]) + 1, int(loss.steps.size)
    within = "" if losses >= steps else f", {losses:,} of which have one"
    return counted(steps, "step") + within


def _evaluations_text(evaluation: Line) -> str:
    known = np.isfinite(evaluation.y)
    if not known.any():
        return "The loss of the evaluations was never finite."
    best = int(np.argmin(np.where(known, evaluation.y, np.inf)))
    return (
        f"The evaluations' loss was lowest at step {int(evaluation.x[best]):,} "
        f"({value_text(float(evaluation.y[best]))}), and "
        f"{value_text(float(evaluation.y[-1]))} in the last one."
    )


def _ends(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The medians of the first and of the last hundredth: single batches say little."""
    size = max(values.size // 100, min(values.size // 2, 5), 1)
    return float(np.median(values[:size])), float(np.median(values[-size:]))


def _figures(loss: Series) -> list[Figure]:
    shown = loss.values[np.isfinite(loss.values)]
    figures = [
        Figure("steps with a loss", int(loss.steps.size)),
        Figure("steps whose loss is not finite", int(loss.steps.size - shown.size)),
    ]
    if shown.size:
        first, last = _ends(shown)
        figures += [
            Figure("median loss of the first steps", first),
            Figure("median loss of the last steps", last),
            Figure("lowest loss", float(shown.min())),
        ]  # fmt: skip
    return figures
