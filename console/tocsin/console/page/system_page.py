"""The machines of a run: cores, GPUs and ranks as heat maps, memory, disk and network as lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tocsin.console.charts import Line, Mark, heat_map, line_chart
from tocsin.console.page.run_charts import HEIGHT, WIDTH
from tocsin.console.page.templating import Content
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.text import plain_line
from tocsin.store import NotCaptured, System

if TYPE_CHECKING:
    from tocsin.store import Run

MAX_RANKS: Final = 256
"""Ranks of which step times are read."""

_CORE: Final = re.compile(r"cpu\.(\d+)\.percent")
_GPU: Final = re.compile(r"gpu\.(\d+)\.(\w+)")
_MAPS: Final = (
    ("utilization_percent", "GPU utilization", "percent"),
    ("memory_used_bytes", "GPU memory", "bytes"),
    ("temperature_celsius", "GPU temperature", "°C"),
    ("power_watts", "GPU power", "W"),
)
_LINES: Final[Sequence[tuple[str, str, Mapping[str, str]]]] = (
    ("Processor", "percent", {
        "cpu.percent": "all cores", "cpu.busiest_percent": "busiest core",
        "cpu.iowait_percent": "waiting for I/O",
    }),
    ("Job", "percent", {
        "cpu.process_tree_percent": "all its processes",
        "cpu.process_tree_busiest_core_percent": "its busiest thread",
        "data_loader.cpu_percent": "data loader",
    }),
    ("Memory", "bytes", {
        "memory.used_bytes": "machine", "memory.process_tree_bytes": "job",
        "memory.limit_bytes": "limit", "swap.used_bytes": "swap",
    }),
    ("Disk", "bytes/s", {"disk.read_bytes_per_s": "read", "disk.write_bytes_per_s": "written"}),
    ("Network", "bytes/s", {
        "network.received_bytes_per_s": "received", "network.sent_bytes_per_s": "sent",
    }),
    ("Pressure", "percent", {
        "pressure.cpu_some_percent": "processor", "pressure.memory_some_percent": "memory",
        "pressure.io_some_percent": "I/O",
    }),
)  # fmt: skip


def system_content(
    run_id: str,
    run: Run | None,
    node: str,
    issues: Sequence[IssueFiring],
    marks: Sequence[Mark],
    trouble: str,
) -> Content:
    """The page; reads what it shows, so it blocks. `marks` are at steps."""
    nodes = [] if run is None else list(run.nodes())
    chosen = node if node in nodes else nodes[0] if nodes else ""
    system = None if run is None or not chosen else run.system(chosen)
    timed = [] if system is None else _timed(issues, system)
    return Content(
        "system",
        {
            "trouble": trouble,
            "run_id": run_id,
            "node": chosen,
            "nodes": nodes,
            "ranks": [] if run is None else _rank_maps(run, marks),
            "maps": [] if system is None else _node_maps(system, timed),
            "lines": [] if system is None else _lines(system, timed),
        },
    )


def _rank_maps(run: Run, marks: Sequence[Mark]) -> Sequence[tuple[str, str, str]]:
    """Step time and data wait, ranks by steps; of one rank they are on the page of the run."""
    ranks = list(run.ranks())
    ranks, count = ranks[:MAX_RANKS], len(ranks)
    among = f", of the first {len(ranks):,} of {count:,} ranks" if len(ranks) < count else ""
    found = []
    for column, title in (("step_time_s", "Time of a step"), ("data_wait_s", "Waiting for data")):
        series = {}
        for rank in ranks:
            try:
                series[rank] = run.series(column, rank=rank)
            except NotCaptured:
                continue
        if len(series) < 2:
            continue
        steps = np.unique(np.concatenate([one.steps for one in series.values()]))
        values = np.full((len(series), steps.size), np.nan)
        for row, one in enumerate(series.values()):
            values[row, np.searchsorted(steps, one.steps)] = one.values
        slowest = list(series)[int(np.nanargmax(np.nanmedian(values, axis=1)))]
        svg = heat_map(
            [f"rank {rank}" for rank in series], steps, values, title=f"{title}, ranks by steps",
            unit="s", marks=marks, width=WIDTH * 1.5, heading=False,
        )  # fmt: skip
        found.append((title, svg, f"Highest median: rank {slowest}{among}"))
    return found


def _node_maps(system: System, marks: Sequence[Mark]) -> Sequence[tuple[str, str]]:
    at_s = _seconds(system)
    cores = sorted(
        (int(match[1]), column)
        for column in system.columns
        if (match := _CORE.fullmatch(column)) is not None
    )
    found = []
    if cores:
        values = np.array([system.column(column) for _, column in cores])
        svg = heat_map(
            [f"core {number}" for number, _ in cores], at_s, values, title="Load of each core",
            unit="percent", limits=(0.0, 100.0), x_name="time", x_unit="s", marks=marks,
            width=WIDTH, heading=False,
        )  # fmt: skip
        found.append(("Load of each core", svg))
    gpus = sorted({int(m[1]) for column in system.columns if (m := _GPU.fullmatch(column))})
    for suffix, title, unit in _MAPS:
        present = [gpu for gpu in gpus if f"gpu.{gpu}.{suffix}" in system.columns]
        if not present:
            continue
        values = np.array([system.column(f"gpu.{gpu}.{suffix}") for gpu in present])
        svg = heat_map(
            [f"GPU {gpu}" for gpu in present], at_s, values, title=title, unit=unit,
            limits=(0.0, 100.0) if unit == "percent" else None, x_name="time", x_unit="s",
            marks=marks, width=WIDTH, heading=False,
        )  # fmt: skip
        found.append((title, svg))
    return found


def _lines(system: System, marks: Sequence[Mark]) -> Sequence[tuple[str, str]]:
    at_s = _seconds(system)
    found = []
    for title, unit, columns in _LINES:
        lines = [
            Line(text, at_s, system.column(column), missing=True)
            for column, text in columns.items()
            if column in system.columns
        ]
        if lines:
            svg = line_chart(
                lines, title=title, unit=unit, x_name="time", x_unit="s", marks=marks, width=WIDTH,
                height=HEIGHT, heading=False,
            )  # fmt: skip
            found.append((title, svg))
    return found


def _timed(issues: Sequence[IssueFiring], system: System) -> Sequence[Mark]:
    """Where the issues began, in seconds since the first sample."""
    if not system.at_us.size:
        return []
    first_ms = system.at_us[0] / 1000
    return [
        Mark((issue.onset_ms - first_ms) / 1000, issue.severity,
             f"{plain_line(issue.rule)}: {plain_line(issue.reason)}"[:140])
        for issue in issues
        if issue.onset_ms >= first_ms
    ]  # fmt: skip


def _seconds(system: System) -> np.typing.NDArray[np.float64]:
    first = system.at_us[0] if system.at_us.size else 0
    seconds: np.typing.NDArray[np.float64] = (system.at_us - first) / 1e6
    return seconds
