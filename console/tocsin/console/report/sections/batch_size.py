"""Batch size: whether a larger batch would fit and use what is idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tocsin.console.charts import Box, box_chart
from tocsin.console.report.numbers import Gpu, RunNumbers
from tocsin.console.report.section import Figure, Section, not_captured
from tocsin.console.report.sections.gpu_utilization import HOW_GPU, NO_GPU
from tocsin.console.report.sections.shared import box_of, remedies, reported, worst
from tocsin.schemas.records.runs import DataLoaderSeen

KEY: Final = "batch_size"
_TITLE: Final = "Batch size"
_LIMIT: Final = 70.0
_FULL: Final = 90.0
_MAX_BOXES: Final = 4


def batch_size(numbers: RunNumbers) -> Section:
    """The reference's condition: p95 of GPU, GPU memory and CPU are all below 70 %."""
    batch = _batch(numbers)
    batch_text = "" if batch is None else f" A batch has {batch:,} samples."
    gpus = numbers.gpus()
    if not gpus:
        return not_captured(KEY, _TITLE, f"{NO_GPU}{batch_text}", HOW_GPU)
    boxes: list[Box] = []
    room: list[str] = []
    highest = 0.0
    for gpu in gpus:
        utilization, memory = gpu.column("utilization_percent"), gpu.memory_percent()
        cpu = gpu.node.column("cpu.percent")
        found = [
            None if values is None else box_of(f"{name} of {gpu.name}", values)
            for name, values in (("utilization", utilization), ("memory", memory))
        ]
        own = None if cpu is None else box_of(f"CPU of {gpu.node.name}", cpu)
        boxes += [box for box in found if box is not None]
        if own is not None and own.name not in {box.name for box in boxes}:
            boxes.append(own)
        if all(box is not None and box.p95 < _LIMIT for box in (*found, own)):
            room.append(gpu.name)
        if memory is not None and np.isfinite(memory).any():
            highest = max(highest, float(np.nanmax(memory)))
    if len(gpus) > _MAX_BOXES:
        boxes = _together(gpus)
    issues = numbers.found_by("batch_size")
    if room:
        finding = (
            f"GPU, its memory and the CPU are all below {_LIMIT:.0f} % in the 95th percentile on "
            f"{len(room):,} of {len(gpus):,} GPUs: a larger batch would fit.{batch_text}"
        )
        factor = _FULL / highest if highest > 0 else 0.0
        times = f" of about {factor:.1f} times the size" if factor > 1.1 else ""
        advice = (
            f"Try a batch{times}, with the learning rate adapted, or a smaller GPU. The memory of "
            "the model does not grow with the batch, so more may fit."
        )
    else:
        finding = f"Nothing speaks for a larger batch.{batch_text}"
        advice = ""
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, [finding, reported(issues)])),
        advice=remedies(issues) or advice,
        status=worst(issues) if issues else ("info" if room else "good"),
        figures=[] if batch is None else [Figure("samples of a batch", batch)],
        charts=[
            box_chart(
                boxes, title="GPU, GPU memory and CPU", unit="percent", limit=_LIMIT,
                description="A larger batch fits where GPU, memory and CPU use are all below "
                "the limit",
            )
        ],
    )  # fmt: skip


def _together(gpus: Sequence[Gpu]) -> list[Box]:
    """A box for each of the three, over all GPUs and their nodes."""
    nodes = {gpu.node.name: gpu.node for gpu in gpus}
    columns = (
        ("utilization of all GPUs", [gpu.column("utilization_percent") for gpu in gpus]),
        ("memory of all GPUs", [gpu.memory_percent() for gpu in gpus]),
        ("CPU of all nodes", [node.column("cpu.percent") for node in nodes.values()]),
    )
    found = []
    for name, each in columns:
        known = [values for values in each if values is not None]
        if known and (box := box_of(name, np.concatenate(known))) is not None:
            found.append(box)
    return found


def _batch(numbers: RunNumbers) -> int | None:
    for event in numbers.events():
        if isinstance(event, DataLoaderSeen) and event.mode == "train" and event.batch_size:
            return event.batch_size
    return None
