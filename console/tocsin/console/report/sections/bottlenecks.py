"""CPU and I/O bottlenecks: what else was busy while GPUs waited; without a GPU, what held the job.

A sample is a bottleneck where the job's GPUs are below 10 % in the mean and the other side is above
its limit: one core above 90 %, or more than 50 % of the CPU's time waiting for I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tocsin.console.charts import Bar, Line, line_chart, share_bar, value_text
from tocsin.console.report.numbers import PHASES, Floats, Node, RunNumbers
from tocsin.console.report.section import Figure, Section, Status, Table, not_captured
from tocsin.console.report.sections.shared import remedies, reported, time_marks, worst
from tocsin.console.report.sections.system_usage import NOT_SAMPLED
from tocsin.schemas.text import share_text

_GPU_PERCENT: Final = 10.0
_OFTEN_PERCENT: Final = 50.0
_HELD_PERCENT: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two: its columns, the first that is there decides; and what to say."""

    key: str
    title: str
    rule: str
    what: str
    columns: tuple[str, ...]
    limit: float
    pressure: tuple[tuple[str, str], ...]
    advice: str
    fine: str


CPU: Final = _Side(
    key="cpu_bottlenecks",
    title="CPU bottlenecks",
    rule="cpu_bottleneck",
    what="a core above 90 %",
    columns=("cpu.process_tree_busiest_core_percent", "cpu.busiest_percent", "cpu.percent"),
    limit=90.0,
    pressure=(
        ("the job was held back by its CPU quota", "cpu.throttled_percent"),
        ("tasks of any program were waiting for a CPU", "pressure.cpu_some_percent"),
    ),
    advice="Move work off the training thread: more data loader workers, preprocessing done once "
    "in advance, augmentations on the GPU; give the job more cores.",
    fine="The job was not held up by a lack of CPU.",
)
IO: Final = _Side(
    key="io_bottlenecks",
    title="I/O bottlenecks",
    rule="io_bottleneck",
    what="more than 50 % of the CPU's time waiting for I/O",
    columns=("cpu.iowait_percent",),
    limit=50.0,
    pressure=(
        ("tasks of any program were waiting for I/O", "pressure.io_some_percent"),
        ("all tasks were waiting for I/O", "pressure.io_full_percent"),
    ),
    advice="Read ahead (more workers, a larger prefetch_factor), keep the data on a local disk, or "
    "in fewer and larger files.",
    fine="The CPUs waited little for disks or a network file system.",
)


def cpu_bottlenecks(numbers: RunNumbers) -> Section:
    """When the GPUs waited while a core was above 90 % (without a GPU: what held the job)."""
    return _section(numbers, CPU)


def io_bottlenecks(numbers: RunNumbers) -> Section:
    """When the GPUs waited while the CPU waited for I/O for half of its time."""
    return _section(numbers, IO)


def _section(numbers: RunNumbers, side: _Side) -> Section:
    nodes = [node for node in numbers.nodes() if _busy(node, side) is not None]
    if not nodes:
        return not_captured(
            side.key, side.title, f"No node was sampled that says: {side.what}.", NOT_SAMPLED
        )
    issues = numbers.found_by(side.rule)
    if any(node.gpus() for node in nodes):
        finding, figures, charts, tables, status = _beside_gpus(numbers, nodes, side)
    else:
        finding, figures, charts, tables, status = _without_gpus(nodes, side)
    charts.append(_over_time(nodes[0], numbers, side))
    return Section(
        key=side.key, title=side.title,
        finding=" ".join(filter(None, [finding, reported(issues)])),
        advice=remedies(issues) or (side.advice if status == "info" else ""),
        status=worst(issues) if issues else status,
        figures=figures, charts=charts, tables=tables,
    )  # fmt: skip


_Parts = tuple[str, list[Figure], list[str], list[Table], Status]


def _beside_gpus(numbers: RunNumbers, nodes: list[Node], side: _Side) -> _Parts:
    """Three shares of the samples, as the reference has them: of all samples, not of some."""
    low = bottleneck = count = 0
    phases: dict[str, float] = {}
    for node in nodes:
        busy, gpu = _busy(node, side), _mean_gpu(node)
        if busy is None or gpu is None:
            continue
        known = np.isfinite(busy) & np.isfinite(gpu)
        idle = known & (gpu < _GPU_PERCENT)
        at = idle & (busy > side.limit)
        low, bottleneck, count = low + idle.sum(), bottleneck + at.sum(), count + known.sum()
        _add_phases(phases, numbers, node, at)
    shares = [
        Bar(f"GPU low, {side.what}", float(bottleneck)),
        Bar("GPU low, for another reason", float(low - bottleneck)),
        Bar("GPU busy", float(count - low)),
    ]
    percent = 100 * bottleneck / count if count else 0.0
    finding = (
        f"In {share_text(percent)} % of {count:,} samples the GPUs were below 10 % with "
        f"{side.what}; in {share_text(100 * low / count if count else 0)} % they were below 10 %."
    )
    tables = []
    if phases:
        total = sum(phases.values())
        tables.append(
            Table(
                ("part of the step", "share"),
                [
                    (name, f"{share_text(100 * value / total)} %")
                    for name, value in sorted(phases.items(), key=lambda one: -one[1])
                ],
                "What the training did at these samples",
                frozenset({1}),
            )
        )
    chart = share_bar(shares, title="Samples by what was busy")
    figures = [
        Figure("samples", int(count)),
        Figure("samples with a bottleneck", percent, "percent"),
        Figure("samples with an idle GPU", 100 * low / count if count else 0.0, "percent"),
    ]
    often = percent > _OFTEN_PERCENT
    return finding, figures, [chart], tables, "info" if often else "good"


def _without_gpus(nodes: list[Node], side: _Side) -> _Parts:
    """On the CPU it is busy by design: what counts is whether the job had to wait for it."""
    figures, held, judged = [], [], side is IO
    for node in nodes:
        for name, column in side.pressure:
            if (values := node.column(column)) is not None:
                mean = float(np.nanmean(values))
                judged = True
                figures.append(Figure(f"{node.name}: {name}", mean, "percent"))
                if mean >= _HELD_PERCENT:
                    held.append(f"{node.name} {name} for {value_text(mean, 'percent')}")
        busy = _busy(node, side)
        if busy is not None and side is IO:
            mean = float(np.nanmean(busy))
            figures.append(Figure(f"{node.name}: CPU time waiting for I/O", mean, "percent"))
            if mean >= _HELD_PERCENT:
                held.append(f"{node.name} the CPUs waited for I/O for {mean:.0f} %")
    status: Status = "info" if held else "good" if judged else "plain"
    finding = side.fine if judged else "Whether the job had to wait for a CPU was not sampled."
    if held:
        finding = f"On {'; on '.join(held)} of the time."
    return f"No GPU was sampled. {finding}", figures, [], [], status


def _over_time(node: Node, numbers: RunNumbers, side: _Side) -> str:
    named: tuple[tuple[str, Floats | None], ...] = (
        ("busiest core" if side is CPU else "waiting for I/O", _busy(node, side)),
        ("GPUs, mean", _mean_gpu(node)),
        *((name, node.column(column)) for name, column in side.pressure),
    )
    lines = [
        Line.from_values(name, node.seconds, values, missing=True)
        for name, values in named
        if values is not None
    ]
    return line_chart(
        lines, title=f"{side.title} of {node.name}", unit="percent", x_name="time", x_unit="s",
        marks=time_marks(numbers, node), limit=side.limit,
    )  # fmt: skip


def _busy(node: Node, side: _Side) -> Floats | None:
    found = (node.column(column) for column in side.columns)
    return next((values for values in found if values is not None), None)


def _mean_gpu(node: Node) -> Floats | None:
    columns = [gpu.column("utilization_percent") for gpu in node.gpus()]
    found = [column for column in columns if column is not None]
    if not found:
        return None
    stacked = np.array(found)
    known = np.isfinite(stacked)
    mean = np.where(known, stacked, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    return np.where(known.any(axis=0), mean, np.nan)


def _add_phases(
    phases: dict[str, float],
    numbers: RunNumbers,
    node: Node,
    at: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> None:
    """Add the parts of the steps that were under way at these samples."""
    times = numbers.step_times()
    if times is None or not at.any():
        return
    ends = np.searchsorted(times.at_us, node.system.at_us[at])
    steps = np.unique(ends[ends < times.steps.size])
    for name, values in times.parts.items():
        if name in PHASES.values() and (seconds := float(values[steps].sum())) > 0:
            phases[name] = phases.get(name, 0.0) + seconds
