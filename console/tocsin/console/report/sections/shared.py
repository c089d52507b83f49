"""What several sections need: marks of issues, statistics of a series, a rule's finding. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from tocsin.console.charts import Box, Mark, value_text
from tocsin.console.report.numbers import Floats, Node, RunNumbers
from tocsin.console.report.section import Status, Table, numbered
from tocsin.schemas.records.issues import SEVERITIES, IssueFiring
from tocsin.schemas.text import plain_line


def step_marks(numbers: RunNumbers) -> list[Mark]:
    """The issues of the run at the step at which each started."""
    return [
        Mark(issue.first_step, issue.severity, f"{issue.rule}: {issue.reason}")
        for issue in numbers.issues()
        if issue.first_step is not None
    ]


def time_marks(numbers: RunNumbers, node: Node) -> list[Mark]:
    """The same at their seconds since the first sample of a node."""
    return [
        Mark((issue.onset_ms * 1000 - node.start_us) / 1e6, issue.severity, issue.rule)
        for issue in numbers.issues()
        if issue.onset_ms
    ]


def box_of(name: str, values: Floats) -> Box | None:
    """The quantiles of the values that are there; None: there are none."""
    shown = values[np.isfinite(values)]
    if not shown.size:
        return None
    p05, p25, p50, p75, p95 = (float(q) for q in np.percentile(shown, (5, 25, 50, 75, 95)))
    return Box(name=name, p05=p05, p25=p25, p50=p50, p75=p75, p95=p95)


NOT_JUDGED: Final = "No rule has judged this run."
HOW_JUDGED: Final = (
    "On the embedded bus the helper of `tocsin run` evaluates the rules; on Kafka, "
    "`tocsin rules` does."
)

STATISTICS = ("max", "p99", "p95", "median", "min")


def statistics(values: Floats, unit: str | None) -> list[str]:
    """`STATISTICS` of the values that are there, as texts."""
    shown = values[np.isfinite(values)]
    if not shown.size:
        return ["-"] * len(STATISTICS)
    found = np.percentile(shown, (100, 99, 95, 50, 0))
    return [value_text(float(value), unit) for value in found]


def statistics_table(
    first: Sequence[str], rows: Iterable[tuple[Sequence[str], Floats, str | None]], caption: str
) -> Table:
    """A row of statistics for each: its names, its values, their unit."""
    columns = (*first, *STATISTICS)
    return Table(
        columns,
        [(*names, *statistics(values, unit)) for names, values, unit in rows],
        caption,
        frozenset(range(len(first), len(columns))),
    )


def worst(issues: Sequence[IssueFiring]) -> Status:
    """The gravest severity of issues; `good` without any."""
    if not issues:
        return "good"
    return max((issue.severity for issue in issues), key=SEVERITIES.index)


def reported(issues: Sequence[IssueFiring]) -> str:
    """What rules have said of it: their sentences, each once; empty without any."""
    reasons = dict.fromkeys(plain_line(issue.reason).rstrip(".") for issue in issues)
    named = (
        [f"The rule {issues[0].rule} reports: {'; '.join(list(reasons)[:3])}."] if reasons else []
    )
    more = len(reasons) - 3
    return "".join(named) + (f" And {more:,} more." if more > 0 else "")


def remedies(issues: Sequence[IssueFiring]) -> str:
    """What these rules suggest, each once."""
    return " ".join(dict.fromkeys(plain_line(issue.remedy) for issue in issues if issue.remedy))


def listed(names: Sequence[str]) -> str:
    """The first six names, and how many more."""
    more = f" and {len(names) - 6:,} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


__all__ = [
    "HOW_JUDGED", "NOT_JUDGED", "STATISTICS", "box_of", "listed", "numbered", "remedies",
    "reported", "statistics", "statistics_table", "step_marks", "time_marks", "worst",
]  # fmt: skip
