"""Memory of the GPUs and of the nodes, and whether it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tocsin.console.charts import Line, box_chart, line_chart, value_text
from tocsin.console.report.numbers import Floats, Node, RunNumbers
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
from tocsin.console.report.sections.system_usage import NOT_SAMPLED

KEY: Final = "memory"
_TITLE: Final = "Memory"
_GROWS: Final = 0.1
_MIN_SAMPLES: Final = 60
_MIN_BYTES: Final = 256 * 1024**2
_NEAR_PERCENT: Final = 95.0
_MAX_NODES: Final = 8
"""Nodes in the finding, the charts and the table; all are judged."""
_MAX_GPUS: Final = 64
"""GPUs in the chart and the table; all are judged."""
_COLUMNS: Final = (
    ("used on the node", "memory.used_bytes"),
    ("of the job", "memory.process_tree_bytes"),
    ("of its control group", "memory.group_used_bytes"),
)

_KEPT: Final = (
    "Find what is kept: lists of losses with their graphs (use `.item()`), caches of the data set "
    "in each worker, results of evaluations."
)
_FULL: Final = (
    "A part of a full GPU may be freed memory that the framework keeps for later. If the job fails "
    "for want of memory, use a smaller batch, or recompute activations in the backward pass."
)


def memory(numbers: RunNumbers) -> Section:
    """GPU memory as boxes, the nodes' memory over time, and a growth in the second half."""
    nodes = numbers.nodes()
    if not nodes:
        return not_captured(KEY, _TITLE, "No node was sampled.", NOT_SAMPLED)
    issues = numbers.found_by("gpu_memory_increase", "host_memory_increase")
    findings, rows, charts, figures = [], [], [], []
    boxes, full = [], []
    for i, gpu in enumerate(numbers.gpus()):
        used, percent = gpu.column("memory_used_bytes"), gpu.memory_percent()
        if used is None:
            continue
        if i < _MAX_GPUS:
            rows.append(((gpu.node.name, f"GPU {gpu.number}"), used, "bytes"))
        if percent is not None and (box := box_of(gpu.name, percent)) is not None:
            boxes.append(box)
            if box.p95 > _NEAR_PERCENT:
                full.append(gpu.name)
    if full:
        findings.append(f"The memory of {listed(full)} is almost full.")
    if boxes:
        charts.append(box_chart(boxes[:_MAX_GPUS], title="GPU memory in use", unit="percent"))
        highest = max(boxes, key=lambda box: box.p95)
        findings.append(
            f"95 of 100 samples have at most {value_text(highest.p95, 'percent')} of the memory of "
            f"{highest.name} in use{', the fullest' if len(boxes) > 1 else ''}."
        )
    grown = {node.name: _grown(node) for node in nodes}
    most = sorted(nodes, key=lambda node: -grown[node.name])
    for node in most[:_MAX_NODES]:
        own = [
            ((node.name, name), v, "bytes")
            for name, c in _COLUMNS
            if (v := node.column(c)) is not None
        ]
        rows += own
        if own:
            charts.append(_over_time(node, numbers))
        findings.append(_judged(node, grown[node.name]))
        peak = node.column("memory.process_tree_bytes")
        if peak is not None:
            figures.append(
                Figure(f"{node.name}: highest memory of the job", float(np.nanmax(peak)), "bytes")
            )
    findings.append(_others([grown[node.name] for node in most[_MAX_NODES:]]))
    grows = any(grown.values())
    if not rows:
        return not_captured(KEY, _TITLE, "No memory was sampled.", NOT_SAMPLED)
    findings.append(reported(issues))
    advice = remedies(issues) or " ".join([_KEPT] * grows + [_FULL] * bool(full))
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, findings)), advice=advice,
        status=worst(issues) if issues else ("info" if grows or full else "good"),
        figures=figures, charts=charts,
        tables=[statistics_table(("node", "what"), rows, "Memory")],
    )  # fmt: skip


def growth(values: Floats) -> float | None:
    """By how much the last fifth is above the third one, in bytes; None: too few samples.

    The first fifths are left out: a training takes its memory in its first steps.
    """
    known = values[np.isfinite(values)]
    if known.size < _MIN_SAMPLES:
        return None
    size = known.size // 5
    return float(np.median(known[-size:]) - np.median(known[2 * size : 3 * size]))


def _used(node: Node) -> Floats | None:
    own = node.column("memory.process_tree_bytes")
    return own if own is not None else node.column("memory.used_bytes")


def _grown(node: Node) -> float:
    """By how much the memory in use has grown, in bytes; 0: not by enough to speak of."""
    used = _used(node)
    more = None if used is None else growth(used)
    if used is None or more is None:
        return 0.0
    return more if more >= max(_MIN_BYTES, _GROWS * float(np.nanmedian(used))) else 0.0


def _judged(node: Node, grown: float) -> str:
    used = _used(node)
    if used is None:
        return ""
    whose = "The job" if node.column("memory.process_tree_bytes") is not None else "All processes"
    peak = value_text(float(np.nanmax(used)), "bytes")
    limit = node.column("memory.limit_bytes")
    total = limit if limit is not None else node.column("memory.total_bytes")
    of = "" if total is None else f" of {value_text(float(np.nanmax(total)), 'bytes')}"
    finding = f"{whose} used at most {peak}{of} on {node.name}."
    if not grown:
        return finding
    return f"{finding} It grew by {value_text(grown, 'bytes')} in the last half of the run."


def _others(grown: Sequence[float]) -> str:
    """One sentence about the nodes that are not shown; empty without any."""
    if not grown:
        return ""
    count = sum(map(bool, grown))
    how = f"it grew on {count:,} of them" if count else "it did not grow there"
    plural = " was" if len(grown) == 1 else "s were"
    return f"{len(grown):,} more node{plural} judged: {how}."


def _over_time(node: Node, numbers: RunNumbers) -> str:
    lines = [
        Line.from_values(name, node.seconds, values, missing=True)
        for name, column in _COLUMNS
        if (values := node.column(column)) is not None
    ]
    limit = node.column("memory.limit_bytes")
    if limit is None:
        limit = node.column("memory.total_bytes")
    return line_chart(
        lines, title=f"Memory of {node.name}", unit="bytes", x_name="time", x_unit="s",
        marks=time_marks(numbers, node),
        limit=None if limit is None else float(np.nanmin(limit)), limit_name="available",
    )  # fmt: skip
