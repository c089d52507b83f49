"""The framework metrics: which part of a step takes how much of its time."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import Bar, Line, share_bar, stacked_chart, value_text
from tocsin.console.report.numbers import PHASES, REST, RunNumbers, StepTimes
from tocsin.console.report.section import Figure, Section, Table, not_captured
from tocsin.console.report.sections.shared import step_marks
from tocsin.schemas.records.runs import PhaseMark
from tocsin.schemas.text import counted, plain_line, share_text

KEY: Final = "framework_metrics"
_TITLE: Final = "Framework metrics"
_OTHERS_PERCENT: Final = 25.0
_FORWARD_PERCENT: Final = 70.0
_TRAINING: Final = ("forward", "backward", "optimizer")
_DEVICE: Final = ("forward_device_s", "backward_device_s", "optimizer_device_s")


def step_phases(numbers: RunNumbers) -> Section:
    """Shares of the step time; the reference's limits of 25 % for others and 70 % for forward."""
    times = numbers.step_times()
    if times is None or not times.parts:
        return not_captured(
            KEY, _TITLE, "No step was timed by its parts.",
            "Capture times the forward and backward pass of PyTorch modules and the optimizer by "
            "itself; a loop of another framework can name its phases: "
            '`with run.phase("evaluation"): …`.',
        )  # fmt: skip
    sums = {name: float(values.sum()) for name, values in times.parts.items()}
    total = sum(sums.values()) or 1.0
    training = sum(sums.get(name, 0.0) for name in _TRAINING)
    shares = {name: 100 * value / total for name, value in sums.items()}
    missing = [name for name in ("forward", "backward") if name not in sums]
    were = "was" if len(missing) == 1 else "were"
    findings, advice = [f"The {' and the '.join(missing)} pass {were} not timed."], list[str]()
    if not missing:
        findings, advice = _judged(shares, 100 * training / total, sums)
    charts = [
        share_bar(
            [Bar(name, value) for name, value in sums.items()], unit="s",
            title="Where the time of all steps went",
        ),
        _over_steps(times, numbers),
    ]  # fmt: skip
    tables = [
        Table(
            ("part", "time", "share of the step time", "median of a step"),
            [
                (
                    name, value_text(value, "s"), f"{share_text(shares[name])} %",
                    value_text(float(np.median(times.parts[name])), "s"),
                )
                for name, value in sums.items()
            ],
            f"Parts of {counted(times.steps.size, 'step')} of rank {numbers.first_rank}",
            frozenset({1, 2, 3}),
        )
    ]  # fmt: skip
    if (device := _device_table(numbers)) is not None:
        tables.append(device)
    if (named := _named_phases(numbers)) is not None:
        tables.append(named)
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(findings), advice=" ".join(advice),
        status="info" if advice else "plain" if missing else "good",
        figures=[Figure(f"share of {name}", share, "percent") for name, share in shares.items()],
        charts=charts, tables=tables,
    )  # fmt: skip


def _judged(
    shares: dict[str, float], training: float, sums: dict[str, float]
) -> tuple[list[str], list[str]]:
    findings = [
        f"Forward, backward and optimizer take {share_text(training)} % of the time of the steps."
    ]
    advice = []
    if 100 - training > _OTHERS_PERCENT:
        largest = max((n for n in shares if n not in _TRAINING), key=shares.__getitem__)
        findings.append(
            f"Everything else takes {share_text(100 - training)} %, most of it: {largest} "
            f"({share_text(shares[largest])} %)."
        )
        if largest == PHASES["data_wait_s"]:
            advice.append("See the section on the data loader.")
        elif largest == PHASES["checkpoint_s"]:
            advice.append("Write checkpoints less often, or asynchronously.")
        elif largest == PHASES["evaluation_s"]:
            advice.append("Evaluate less often, or on a sample of the data.")
        else:
            advice.append(
                "Look for work between two steps: logging, metrics that wait for the GPU "
                "(`.item()`), copies of batches."
            )
    forward = 100 * sums["forward"] / (sums["forward"] + sums["backward"])
    if forward > _FORWARD_PERCENT:
        share = share_text(forward)
        findings.append(f"The forward pass takes {share} % of the time of both passes.")
        advice.append(
            "A forward pass is usually half as long as the backward pass: check for work in it "
            "that needs no gradient, or for transfers to the GPU."
        )
    return findings, advice


def _over_steps(times: StepTimes, numbers: RunNumbers) -> str:
    # An evaluation is between two steps, and a hundred times as long as one.
    order = [*PHASES.values(), REST]
    order.remove(PHASES["evaluation_s"])
    parts = [
        Line.from_values(name, times.steps, times.parts[name])
        for name in order
        if name in times.parts
    ]
    return stacked_chart(
        parts, title="Parts of the step time, by step", unit="s", marks=step_marks(numbers)
    )


def _device_table(numbers: RunNumbers) -> Table | None:
    """What the GPU itself took, each tenth step."""
    rows = []
    for column in _DEVICE:
        series = numbers.series(column)
        if series is not None and np.isfinite(series.values).any():
            shown = series.values[np.isfinite(series.values)]
            name = column.removesuffix("_device_s")
            median, p95 = (float(q) for q in np.percentile(shown, (50, 95)))
            rows.append((name, value_text(median, "s"), value_text(p95, "s")))
    if not rows:
        return None
    caption = "Time on the GPU itself, of each tenth step"
    return Table(("part", "median", "p95"), rows, caption, frozenset({1, 2}))


def _named_phases(numbers: RunNumbers) -> Table | None:
    """Phases that the program or its framework has named."""
    totals: dict[str, list[float]] = {}
    for event in numbers.events():
        if isinstance(event, PhaseMark) and event.edge == "end" and event.duration_s is not None:
            totals.setdefault(plain_line(event.name), []).append(event.duration_s)
    if not totals:
        return None
    rows = [
        (name, f"{len(found):,}", value_text(sum(found), "s"), value_text(max(found), "s"))
        for name, found in sorted(totals.items(), key=lambda one: -sum(one[1]))[:20]
    ]
    return Table(
        ("phase", "times", "total", "longest"), rows, "Phases by name", frozenset({1, 2, 3})
    )
