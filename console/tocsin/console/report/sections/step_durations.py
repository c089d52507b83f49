"""How long a step takes, how evenly, and whether that has changed."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import Line, histogram, line_chart, value_text
from tocsin.console.report.numbers import Floats, RunNumbers
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.shared import (
    remedies,
    reported,
    statistics_table,
    step_marks,
    worst,
)
from tocsin.schemas.text import counted

KEY: Final = "step_durations"
_TITLE: Final = "Step durations"
_CHANGED: Final = 0.1
_MIN_STEPS: Final = 40


def step_durations(numbers: RunNumbers) -> Section:
    """The distribution of step times, without evaluations between them."""
    times = numbers.step_times()
    if times is None:
        return not_captured(
            KEY, _TITLE, "No step was timed.",
            "A step ends at `optimizer.step()`; in another framework `run.log(…, step=n)` ends it.",
        )  # fmt: skip
    own = times.own_s
    median = float(np.median(own))
    issues = numbers.found_by("throughput_regression", "stalled_training")
    findings = [
        f"A step takes {value_text(median, 's')} in the median "
        f"({value_text(1 / median) if median else '-'} steps/s); "
        f"95 of 100 take at most {value_text(float(np.percentile(own, 95)), 's')}."
    ]
    change = drift(own)
    if change is not None and abs(change) >= _CHANGED:
        slower = "longer" if change > 0 else "shorter"
        findings.append(
            f"In the last fifth, a step takes {abs(100 * change):.0f} % {slower} than in the first "
            "fifth."
        )
    findings.append(reported(issues))
    advice = remedies(issues)
    if not advice and change is not None and change >= _CHANGED:
        advice = (
            "Check what grows over the run: the memory of the node, the temperature of its "
            "GPUs, lists of tensors that the loop keeps."
        )
    status = worst(issues) if issues else ("info" if advice else "good")
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, findings)), advice=advice,
        status=status,
        figures=[
            Figure("steps", int(times.steps.size)),
            Figure("median step time", median, "s"),
            Figure("mean step time", float(own.mean()), "s"),
            Figure("p95 of the step time", float(np.percentile(own, 95)), "s"),
            Figure("p99 of the step time", float(np.percentile(own, 99)), "s"),
            *([] if change is None else [Figure("change over the run", 100 * change, "percent")]),
        ],
        charts=[
            histogram(own, title="Distribution of the step time", unit="s", name="steps"),
            line_chart(
                [Line.from_values("step time", times.steps, own)], title="Step time", unit="s",
                marks=step_marks(numbers),
            ),
        ],
        tables=[
            statistics_table(
                ("",),
                [(("step time",), own, "s")],
                f"Step time of {counted(times.steps.size, 'step')}",
            )
        ],
    )  # fmt: skip


def drift(own: Floats) -> float | None:
    """The median of the last fifth against that of the first, as a share; None: too few steps."""
    size = own.size // 5
    if own.size < _MIN_STEPS:
        return None
    first, last = float(np.median(own[:size])), float(np.median(own[-size:]))
    return last / first - 1 if first > 0 else None
