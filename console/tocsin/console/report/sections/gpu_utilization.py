"""GPU utilization: how busy each GPU of the job was, and how evenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tocsin.console.charts import Line, box_chart, heat_map, line_chart, value_text
from tocsin.console.report.numbers import Gpu, RunNumbers
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.shared import (
    box_of,
    listed,
    remedies,
    reported,
    statistics_table,
    time_marks,
    worst,
)

KEY: Final = "gpu_utilization"
_TITLE: Final = "GPU utilization"
_HIGH: Final = 70.0
_LOW: Final = 10.0
_MAX_GPUS: Final = 64
"""GPUs in the charts and the table; all are judged."""
_LINES: Final = 3
NO_GPU: Final = "No GPU was sampled."
HOW_GPU: Final = (
    "NVIDIA GPUs are sampled through their driver, on nodes where `tocsin run` or `tocsin sample` "
    "runs. A job that trains on the CPU has none."
)


def gpu_utilization(numbers: RunNumbers) -> Section:
    """The reference's two cases: p95 below 70 is under-used; p5 below 10 fluctuates."""
    gpus = [gpu for gpu in numbers.gpus() if gpu.column("utilization_percent") is not None]
    if not gpus:
        return not_captured(KEY, _TITLE, NO_GPU, HOW_GPU)
    boxes, rows, low, uneven = [], [], [], []
    for gpu in gpus:
        values = gpu.column("utilization_percent")
        assert values is not None
        rows.append(((gpu.node.name, f"GPU {gpu.number}"), values, "percent"))
        box = box_of(gpu.name, values)
        if box is None:
            continue
        boxes.append(box)
        if box.p95 < _HIGH:
            low.append(gpu.name)
        elif box.p05 < _LOW:
            uneven.append(gpu.name)
    issues = numbers.found_by("low_gpu_utilization")
    medians = [box.p50 for box in boxes]
    findings = [
        f"{len(gpus):,} GPU{'s' * (len(gpus) > 1)}, busy for "
        f"{value_text(float(np.median(medians)), 'percent')} in the median."
    ]
    if low:
        findings.append(f"Under-used, less than 70 % in the 95th percentile: {listed(low)}.")
    if uneven:
        findings.append(
            f"Idle again and again, below 10 % in the 5th percentile: {listed(uneven)}."
        )
    findings.append(reported(issues))
    advice = remedies(issues)
    if not advice and (low or uneven):
        advice = (
            "Find what the GPUs wait for: see the data loader, the CPU and I/O bottlenecks. If "
            "nothing else is busy, use a larger batch or a smaller GPU."
        )
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, findings)), advice=advice,
        status=worst(issues) if issues else ("info" if low or uneven else "good"),
        figures=[Figure(f"median of {box.name}", box.p50, "percent") for box in boxes[:_MAX_GPUS]],
        charts=[
            box_chart(boxes[:_MAX_GPUS], title="Utilization by GPU", unit="percent", limit=_HIGH),
            _over_time(numbers, gpus[:_MAX_GPUS]),
        ],
        tables=[statistics_table(("node", "GPU"), rows[:_MAX_GPUS], "Utilization")],
    )  # fmt: skip


def _over_time(numbers: RunNumbers, gpus: Sequence[Gpu]) -> str:
    """Lines of a few GPUs, else a map of GPUs by the times of the first node."""
    first = gpus[0].node
    title, marks = "Utilization over time", time_marks(numbers, first)
    found = [(g, v) for g in gpus if (v := g.column("utilization_percent")) is not None]
    if len(found) <= _LINES:
        lines = [Line.from_values(gpu.name, gpu.node.seconds, v, missing=True) for gpu, v in found]
        return line_chart(
            lines, title=title, unit="percent", x_name="time", x_unit="s", marks=marks
        )
    # A node that was not sampled at that time has no value there.
    cells = np.array(
        [
            np.interp(first.seconds, gpu.node.seconds, values, left=np.nan, right=np.nan)
            for gpu, values in found
        ]
    )
    return heat_map(
        [gpu.name for gpu, _ in found], first.seconds, cells, title=title, unit="percent",
        x_name="time", x_unit="s", marks=marks, limits=(0, 100), combine="mean",
    )  # fmt: skip
