"""System usage statistics: how much of each node the run has used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tocsin.console.charts import Line, heat_map, line_chart, value_text
from tocsin.console.report.numbers import Floats, Node, RunNumbers
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.shared import statistics_table, time_marks

KEY: Final = "system_usage"
_TITLE: Final = "System usage statistics"
NOT_SAMPLED: Final = (
    "`tocsin run` samples its node; where the launcher does not run, `tocsin sample` does. "
    "`capture: {system: off}` switches it off."
)
_USED_PERCENT: Final = 70.0
_MAX_NODES: Final = 8
_COLUMNS: Final = (
    ("CPU", "cpu.percent", "percent"),
    ("CPU of the job, one core is 100 %", "cpu.process_tree_percent", "percent"),
    ("CPU waiting for I/O", "cpu.iowait_percent", "percent"),
    ("memory", "memory.used_bytes", "bytes"),
    ("memory of the job", "memory.process_tree_bytes", "bytes"),
    ("disk read", "disk.read_bytes_per_s", "bytes/s"),
    ("disk write", "disk.write_bytes_per_s", "bytes/s"),
    ("network received", "network.received_bytes_per_s", "bytes/s"),
    ("network sent", "network.sent_bytes_per_s", "bytes/s"),
)


def system_usage(numbers: RunNumbers) -> Section:
    """A table node by metric (max, p99, p95, median, min), and the reference's advice."""
    nodes = numbers.nodes()
    if not nodes:
        return not_captured(KEY, _TITLE, "No node was sampled.", NOT_SAMPLED)
    finding, advice = _judged(numbers)
    charts = [chart for node in nodes[:_MAX_NODES] for chart in _charts(node, numbers)]
    rows = [
        ((node.name, name), values, unit) for node in nodes for name, values, unit in _metrics(node)
    ]
    if len(nodes) > _MAX_NODES:
        finding += f" Charts are of the first {_MAX_NODES} of {len(nodes):,} nodes."
    return Section(
        key=KEY, title=_TITLE, finding=finding, advice=advice,
        status="info" if advice else "good", charts=charts, figures=_figures(numbers),
        tables=[statistics_table(("node", "metric"), rows, "Samples of the nodes")],
    )  # fmt: skip


def _metrics(node: Node) -> Iterator[tuple[str, Floats, str]]:
    for name, column, unit in _COLUMNS:
        if (values := node.column(column)) is not None:
            yield name, values, unit
    for gpu in node.gpus():
        for what, unit in (("utilization_percent", "percent"), ("memory_used_bytes", "bytes")):
            if (values := gpu.column(what)) is not None:
                label = "utilization" if what.startswith("util") else "memory"
                yield f"GPU {gpu.number} {label}", values, unit


def _judged(numbers: RunNumbers) -> tuple[str, str]:
    """The reference's three cases, by the 95th percentiles; without a GPU by the CPU alone."""
    cpu = _together([node.column("cpu.percent") for node in numbers.nodes()])
    gpu = _together([gpu.column("utilization_percent") for gpu in numbers.gpus()])
    sentences = []
    if cpu.size:
        sentences.append(f"The CPUs were busy for {_quantiles(cpu)}.")
    if not gpu.size:
        sentences.append("No GPU was sampled.")
        return " ".join(sentences), ""
    sentences.append(f"The GPUs were busy for {_quantiles(gpu)}.")
    gpu95, gpu50 = np.percentile(gpu, (95, 50))
    cpu95 = float(np.percentile(cpu, 95)) if cpu.size else np.nan
    if gpu50 > _USED_PERCENT:
        sentences.append("The GPUs are well used.")
        return " ".join(sentences), ""
    if gpu95 < _USED_PERCENT and cpu95 > _USED_PERCENT:
        return " ".join(sentences), (
            "The GPUs wait while the CPUs are busy: see the CPU bottlenecks, and give the job more "
            "CPU cores or less work on them."
        )
    if gpu95 < _USED_PERCENT and cpu.size:
        return " ".join(sentences), (
            "Both are used little: a smaller machine would do, or a larger batch (see the batch "
            "size)."
        )
    return " ".join(sentences), ""


def _quantiles(values: Floats) -> str:
    middle, high = (value_text(float(v), "percent") for v in np.percentile(values, (50, 95)))
    return f"{middle} in the median and {high} in the 95th percentile"


def _together(columns: list[Floats | None]) -> Floats:
    found = [column[np.isfinite(column)] for column in columns if column is not None]
    return np.concatenate(found) if found else np.empty(0)


def _figures(numbers: RunNumbers) -> list[Figure]:
    cpu = _together([node.column("cpu.percent") for node in numbers.nodes()])
    gpu = _together([gpu.column("utilization_percent") for gpu in numbers.gpus()])
    figures = [Figure("nodes", len(numbers.nodes())), Figure("GPUs", len(numbers.gpus()))]
    for name, values in (("CPU", cpu), ("GPU", gpu)):
        if values.size:
            figures += [
                Figure(f"{name} utilization, median", float(np.median(values)), "percent"),
                Figure(f"{name} utilization, p95", float(np.percentile(values, 95)), "percent"),
            ]
    return figures


def _charts(node: Node, numbers: RunNumbers) -> Iterator[str]:
    marks, seconds = time_marks(numbers, node), node.seconds
    busy = [
        Line.from_values(name, seconds, values, missing=True)
        for name, column in (
            ("CPU", "cpu.percent"), ("I/O wait", "cpu.iowait_percent"),
            ("throttled", "cpu.throttled_percent"),
        )
        if (values := node.column(column)) is not None
    ]  # fmt: skip
    if busy:
        title = f"CPU of {node.name}"
        yield line_chart(busy, title=title, unit="percent", marks=marks, x_name="time", x_unit="s")
    cores = node.numbered("cpu", "percent")
    if len(cores) > 1:
        yield heat_map(
            [f"core {core}" for core in cores], seconds,
            node.system.values[:, [node.system.columns.index(f"cpu.{n}.percent") for n in cores]].T,
            title=f"Cores of {node.name}", unit="percent", limits=(0, 100), combine="mean",
            x_name="time", x_unit="s",
        )  # fmt: skip
    flows = [
        Line.from_values(name, seconds, values, missing=True)
        for name, column, unit in _COLUMNS
        if unit == "bytes/s" and (values := node.column(column)) is not None
    ]
    if flows:
        title = f"Disks and network of {node.name}"
        yield line_chart(
            flows, title=title, unit="bytes/s", marks=marks, height=200, x_name="time", x_unit="s"
        )
