"""The charts of a run's page. Pure, but for what `Run` reads when it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tocsin.console.charts import Bar, Line, Mark, line_chart, share_bar, stacked_chart
from tocsin.console.page.numbers import line_of, scalars_of, series_of
from tocsin.console.views.goodput import NAMES
from tocsin.schemas.records.goodput import PARTS, Goodput

if TYPE_CHECKING:
    from tocsin.store import Run

WIDTH: Final = 460.0
HEIGHT: Final = 205.0

MAX_OWN: Final = 18
"""Charts of the user's own scalars on the page; the rest is on the page where people zoom."""

_NORMS: Final = {
    "gradient_norm": "gradient norm",
    "gradient_norm_sampled": "sampled",
    "gradient_norm_local_part": "this rank's part",
    "gradient_norm_clipped": "after clipping",
}
_PHASES: Final = {
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "data_wait_s": "waiting for data",
    "checkpoint_s": "checkpoint",
    "evaluation_s": "evaluation",
}


def run_charts(
    run: Run | None, marks: Sequence[Mark], goodput: Goodput | None
) -> Mapping[str, object]:
    """Name -> SVG; empty where nothing was captured. `own` are the user's own, name -> SVG."""
    names = scalars_of(run)
    losses = [name for name in names if name == "loss" or name.startswith("loss.")]
    rates = [name for name in names if name.startswith("lr.")]
    own = [name for name in names if name.startswith("log.")]
    evaluation = line_of(run, "loss", "evaluation", "eval")
    return {
        "loss": _lines(
            run,
            {name: _loss_name(name) for name in losses},
            "Loss",
            marks,
            more=[] if evaluation is None else [_last_of_each(evaluation)],
        ),
        "rate": _lines(
            run, {name: f"group {name[3:]}" for name in rates[:8]}, "Learning rate", marks
        ),
        "norm": _lines(
            run, {name: text for name, text in _NORMS.items() if name in names}, "Gradient norm",
            marks,
        ),
        "phases": phases_chart(run, marks),
        "goodput": "" if goodput is None else goodput_bar(goodput),
        "own": {
            name.removeprefix("log."): _lines(run, {name: name[4:]}, name[4:], marks)
            for name in own[:MAX_OWN]
        },
        "more": max(0, len(own) - MAX_OWN),
    }  # fmt: skip


def phases_chart(run: Run | None, marks: Sequence[Mark]) -> str:
    """Where the time of each step went, stacked; empty if it was not captured."""
    found = series_of(run, "step_time_s")
    if found is None:
        return ""
    rank, whole = found
    places = whole.steps.astype(np.float64)
    known = np.zeros(len(places))
    parts = []
    for column, text in _PHASES.items():
        line = line_of(run, column, text, rank=rank)
        if line is None:
            continue
        y = aligned(line, places)
        known += y
        parts.append(Line(text, places, y))
    rest = np.maximum(np.where(np.isfinite(whole.values), whole.values, 0.0) - known, 0.0)
    parts.append(Line("other", places, rest))
    return stacked_chart(
        parts, title="Time of a step", unit="s", marks=marks, width=WIDTH, height=HEIGHT + 30,
        heading=False,
    )  # fmt: skip


def goodput_bar(goodput: Goodput) -> str:
    """Where the time of a run went, as one bar."""
    parts = [Bar(NAMES[name], goodput.part(name)) for name in PARTS]
    return share_bar(parts, title="Where the time went", unit="s", width=WIDTH, heading=False)


def aligned(line: Line, places: np.typing.NDArray[np.float64]) -> np.typing.NDArray[np.float64]:
    """Its values at these places, float64[n]; 0 where it has none, or none that is finite."""
    found = np.zeros(len(places))
    if not len(line.x):
        return found
    at = np.searchsorted(line.x, places)
    at[at == len(line.x)] = 0
    there = line.x[at] == places
    found[there] = line.y[at[there]]
    return np.where(np.isfinite(found), found, 0.0)


def _lines(
    run: Run | None,
    columns: Mapping[str, str],
    title: str,
    marks: Sequence[Mark],
    *,
    more: Sequence[Line] = (),
) -> str:
    lines = [
        line for column, text in columns.items() if (line := line_of(run, column, text)) is not None
    ]
    lines += more
    if not lines:
        return ""
    return line_chart(lines, title=title, marks=marks, width=WIDTH, height=HEIGHT, heading=False)


def _loss_name(column: str) -> str:
    return "training" if column == "loss" else column.removeprefix("loss.")


def _last_of_each(line: Line) -> Line:
    """Of the batches of an evaluation, which share a step, their mean."""
    steps, where = np.unique(line.x, return_inverse=True)
    sums = np.bincount(where, weights=line.y)
    return Line(line.name, steps, sums / np.bincount(where))
