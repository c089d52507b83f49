"""Two runs in one verdict: what differs first, how the measures changed, and both losses."""

from __future__ import annotations

from collections.abc import Sequence

from tocsin.console.charts import Line, line_chart, value_text
from tocsin.console.compare.comparison import Comparison, change_text, compare, method_line
from tocsin.console.page.numbers import line_of
from tocsin.console.page.run_charts import HEIGHT, WIDTH
from tocsin.console.page.templating import Content
from tocsin.store import Run

LISTED = 300
"""Runs that are offered; another one can be typed."""

DIFFERENCES = 40

_CURVES = (("loss", "Loss"), ("gradient_norm", "Gradient norm"), ("step_time_s", "Time of a step"))


def compare_content(
    first: Run | None,
    second: Run | None,
    run_ids: tuple[str, str],
    known: Sequence[str],
    message: str,
) -> Content:
    """The page; reads both runs, so it blocks. `message` is why there is nothing to compare."""
    comparison = None
    curves: list[tuple[str, str]] = []
    if first is not None and second is not None:
        comparison = compare(first, second)
        curves = [(title, svg) for name, title in _CURVES if (svg := _both(first, second, name))]
    return Content(
        "compare",
        {
            "trouble": "",
            "asked": run_ids,
            "known": known[:LISTED],
            "message": message,
            "comparison": comparison,
            "differences": [] if comparison is None else comparison.differences[:DIFFERENCES],
            "measures": [] if comparison is None else _measures(comparison),
            "method": "" if comparison is None else method_line(comparison.measures),
            "curves": curves,
        },
    )


def _measures(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Name, both values, and the change in words."""
    rows = []
    for one in comparison.measures:
        values = ("", "")
        if one.change is not None:
            values = (
                value_text(one.change.first, one.unit),
                value_text(one.change.second, one.unit),
            )
        rows.append((one.name, *values, change_text(one)))
    return rows


def _both(first: Run, second: Run, name: str) -> str:
    """A scalar of both runs in one chart; empty if neither has it."""
    lines: list[Line] = []
    for run in (first, second):
        if (line := line_of(run, name, run.run_id)) is not None:
            lines.append(line)
    if not lines:
        return ""
    return line_chart(lines, title=name, width=WIDTH, height=HEIGHT, heading=False)
