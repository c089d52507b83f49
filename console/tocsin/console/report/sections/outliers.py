"""Steps that take far longer than the others, and what they have in common."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import Line, line_chart, value_text
from tocsin.console.report.numbers import Floats, RunNumbers, Steps, StepTimes
from tocsin.console.report.section import Figure, Section, Table, not_captured
from tocsin.console.report.sections.shared import (
    remedies,
    reported,
    step_marks,
    worst,
)
from tocsin.schemas.text import counted, share_text

KEY: Final = "outliers"
_TITLE: Final = "Outliers"
_SIGMA: Final = 1.4826
_SPREADS: Final = 5.0
_TIMES: Final = 2.0
_SHOWN: Final = 15
_MIN_PERCENT: Final = 5.0


def outliers(numbers: RunNumbers) -> Section:
    """By the median and the median absolute deviation, which the outliers themselves do not move.

    An outlier is longer than the median + 5 · 1.4826 · MAD, and than twice the median.
    """
    times = numbers.step_times()
    if times is None:
        return not_captured(KEY, _TITLE, "No step was timed.", "See the step durations.")
    own = times.own_s
    limit = outlier_limit(own)
    found = np.flatnonzero(own > limit)
    issues = numbers.found_by("step_outlier")
    lost_s = float((own[found] - np.median(own)).sum())
    total = float(own.sum()) or 1.0
    share = 100 * lost_s / total
    if not found.size:
        finding = f"No step of {own.size:,} takes longer than {value_text(limit, 's')}."
        status = worst(issues)
    else:
        cause, part = common_part(times, found)
        finding = (
            f"{counted(found.size, 'step')} of {own.size:,} took longer than "
            f"{value_text(limit, 's')}: {value_text(lost_s, 's')} more than usual, "
            f"{share_text(share)} % of the time of all steps."
        )
        if cause:
            finding += f" Most of that ({part:.0f} %) is: {cause}."
        status = worst(issues) if issues else ("info" if share >= _MIN_PERCENT else "good")
    advice = remedies(issues)
    if not advice and status == "info":
        advice = (
            "Compare the steps with what runs at that time: checkpoints, evaluations, the first "
            "batch of an epoch, other jobs on the node."
        )
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, [finding, reported(issues)])),
        advice=advice, status=status,
        figures=[
            Figure("outliers", int(found.size)),
            Figure("limit", limit, "s"),
            Figure("time lost in outliers", lost_s, "s"),
            Figure("share of the time lost in outliers", share, "percent"),
        ],
        charts=[
            line_chart(
                [Line.from_values("step time", times.steps, own)], title="Step time, and its limit",
                unit="s", limit=limit, marks=step_marks(numbers),
            )
        ],
        tables=[_table(times, own, found)] if found.size else [],
    )  # fmt: skip


def outlier_limit(own: Floats) -> float:
    """Seconds above which a step is an outlier."""
    median = float(np.median(own))
    spread = _SIGMA * float(np.median(np.abs(own - median)))
    return max(median + _SPREADS * spread, _TIMES * median)


def common_part(times: StepTimes, found: Steps) -> tuple[str, float]:
    """The part of the step with most of the excess of these steps, and its share in percent."""
    excess = {
        name: float(np.maximum(values[found] - np.median(values), 0).sum())
        for name, values in times.parts.items()
        if name != "evaluation"
    }
    total = sum(excess.values())
    if total <= 0:
        return "", 0.0
    name = max(excess, key=excess.__getitem__)
    return name, 100 * excess[name] / total


def _table(times: StepTimes, own: Floats, found: Steps) -> Table:
    longest = found[np.argsort(-own[found], kind="stable")][:_SHOWN]
    rows = []
    for place in longest:
        part, share = common_part(times, np.array([place]))
        rows.append(
            (
                f"{int(times.steps[place]):,}",
                value_text(float(own[place]), "s"),
                f"{part} ({share:.0f} %)" if part else "-",
            )
        )
    caption = f"The longest {len(rows)} of {found.size:,}" if found.size > _SHOWN else "All of them"
    return Table(("step", "time", "most of the excess in"), rows, caption, frozenset({0, 1}))
