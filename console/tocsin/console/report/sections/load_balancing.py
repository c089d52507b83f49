"""Load balancing: whether ranks and GPUs have equally much to do."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import Box, box_chart, heat_map, value_text
from tocsin.console.report.numbers import Floats, RunNumbers, StepTimes
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.shared import (
    box_of,
    remedies,
    reported,
    statistics_table,
    step_marks,
    worst,
)

KEY: Final = "load_balancing"
_TITLE: Final = "Load balancing"
_APART: Final = 0.2
_POINTS: Final = 15.0
_OWN: Final = ("waiting for data", "forward")


def load_balancing(numbers: RunNumbers) -> Section:
    """By the own work of ranks (their wait for data and forward pass), and by GPU utilization.

    Ranks that average their gradients end their steps together, so their step times say little.
    """
    ranks = [(rank, times) for rank in numbers.ranks() if (times := numbers.step_times(rank))]
    gpus = numbers.gpus()
    every = len(numbers.run.ranks())
    if len(ranks) < 2 and len(gpus) < 2:
        why = "The run has one rank and at most one GPU: there is nothing to balance."
        if every > 1:
            why = f"The run has {every:,} ranks, but their steps were not timed."
        return not_captured(KEY, _TITLE, why, "Each rank that trains under tocsin appears here.")
    issues = numbers.found_by("load_balancing", "straggler_rank")
    findings, charts, tables, figures, uneven = [], [], [], [], False
    if len(ranks) >= 2:
        own = _own_work(ranks)
        medians = {rank: float(np.median(values)) for rank, values in own.items()}
        slow = max(medians, key=medians.__getitem__)
        others = float(np.median([m for rank, m in medians.items() if rank != slow]))
        step = float(np.median([np.median(times.own_s) for _, times in ranks]))
        excess = medians[slow] - others
        figures = [Figure(f"own work of rank {r}, median", m, "s") for r, m in medians.items()]
        if step > 0 and excess > _APART * step:
            uneven = True
            findings.append(
                f"Rank {slow:,} needs {value_text(excess, 's')} more for its own work of a step "
                f"than the median of the others: {100 * excess / step:.0f} % of a step."
            )
        else:
            findings.append(f"{_counted(len(ranks), every)} have about equally much to do.")
        boxes = [box for r, v in own.items() if (box := box_of(f"rank {r}", v)) is not None]
        charts.append(box_chart(boxes, title="Own work of a step, by rank", unit="s"))
        charts.append(_heat(ranks, own, numbers))
        rows = [((f"rank {rank}",), times.own_s, "s") for rank, times in ranks]
        tables.append(statistics_table(("",), rows, "Step time by rank"))
    if len(gpus) >= 2:
        used: list[Box] = []
        for gpu in gpus[:64]:
            values = gpu.column("utilization_percent")
            box = None if values is None else box_of(gpu.name, values)
            if box is not None:
                used.append(box)
        spread = max(b.p50 for b in used) - min(b.p50 for b in used) if used else 0.0
        figures.append(Figure("GPU utilization, medians apart", spread, "percent"))
        if spread > _POINTS:
            uneven = True
            findings.append(f"The medians of the GPUs' utilization are {spread:.0f} points apart.")
        else:
            findings.append(
                f"The medians of {len(used):,} GPUs are at most {spread:.0f} points apart."
            )
        charts.append(box_chart(used, title="Utilization by GPU", unit="percent"))
    findings.append(reported(issues))
    advice = remedies(issues)
    if not advice and uneven:
        advice = (
            "Give each rank equally many samples of equal size (bucket long sequences), and check "
            "the slow rank's node: its disks, its CPU, the clocks of its GPU."
        )
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, findings)), advice=advice,
        status=worst(issues) if issues else ("info" if uneven else "good"),
        figures=figures, charts=charts, tables=tables,
    )  # fmt: skip


def _counted(read: int, every: int) -> str:
    return f"{read:,} ranks" if read == every else f"The {read:,} checked ranks of {every:,}"


def _own_work(ranks: list[tuple[int, StepTimes]]) -> dict[int, Floats]:
    """By rank; of whole steps if one of the ranks has no parts: like is compared with like."""
    found = {
        rank: [times.parts[name] for name in _OWN if name in times.parts] for rank, times in ranks
    }
    if not all(found.values()):
        return {rank: times.own_s for rank, times in ranks}
    return {rank: np.sum(parts, axis=0) for rank, parts in found.items()}


def _heat(ranks: list[tuple[int, StepTimes]], own: dict[int, Floats], numbers: RunNumbers) -> str:
    """Own work rank by step, at the steps that any of them has."""
    steps = np.unique(np.concatenate([times.steps for _, times in ranks]))
    cells = np.full((len(ranks), steps.size), np.nan)
    for row, (rank, times) in enumerate(ranks):
        cells[row, np.searchsorted(steps, times.steps)] = own[rank]
    return heat_map(
        [f"rank {rank}" for rank, _ in ranks], steps, cells, unit="s",
        title="Own work by rank and step", marks=step_marks(numbers),
    )  # fmt: skip
