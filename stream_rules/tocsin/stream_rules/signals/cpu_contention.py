"""Whether the cores of a node are wanted by more than they can do.

Told by the kernel, where it says for how much of the time somebody waited for a core; else by how
busy all cores are, and how much of that is not the job's own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.rule import Input, system

_PRESSURE: Final = "pressure.cpu_some_percent"
_ALL: Final = "cpu.percent"
_OWN: Final = "cpu.process_tree_percent"
_CORES: Final = "cpu.cores"

SYSTEM: Final[tuple[Input, ...]] = tuple(
    system(name, optional=True) for name in (_PRESSURE, _ALL, _OWN, _CORES)
)
"""What it reads."""

CROWDED: Final = 20.0
"""Percent of the time in which somebody waits for a core."""

_FULL: Final = 90.0
_OTHERS: Final = 10.0
_KEPT: Final = 1200


@dataclass(slots=True)
class CpuContention:
    """The last samples of one node: when they came (append time, ms), and whether it was so.

    The node is that of the lowest rank, `rank`; as long as no rank has told where it runs, the
    first that sends samples.
    """

    rank: int | None = None
    node: str = ""
    times_ms: deque[int] = field(default_factory=deque)
    crowded: deque[bool] = field(default_factory=deque)

    def add_start(self, data: RunData) -> None:
        """A trainer reports at its start on which node it runs."""
        if not isinstance(data, RunStarted) or data.role != "trainer" or not data.node:
            return
        if self.rank is not None and data.rank > self.rank:
            return
        self.rank = data.rank
        if data.node != self.node:
            self.node = data.node
            self.times_ms.clear()
            self.crowded.clear()

    def add(self, frame: SystemFrame, now_ms: int) -> None:
        """Take samples in; those of another node are left out."""
        if self.node and frame.node != self.node:
            return
        found = _crowded(frame)
        if found is None:
            return
        self.node = frame.node
        self.times_ms.append(now_ms)
        self.crowded.append(found)
        if len(self.times_ms) > _KEPT:
            self.times_ms.popleft()
            self.crowded.popleft()

    def since(self, began_ms: int) -> bool:
        """Whether it was so for at least a quarter of the time since then; False: not known."""
        found = [
            crowded
            for at, crowded in zip(self.times_ms, self.crowded, strict=True)
            if at >= began_ms
        ]
        return bool(found) and 4 * sum(found) >= len(found)


def _crowded(frame: SystemFrame) -> bool | None:
    pressure = frame.column(_PRESSURE)
    if pressure is not None and np.isfinite(pressure).any():
        return float(np.nanmean(pressure)) >= CROWDED
    everything, own, cores = (frame.column(name) for name in (_ALL, _OWN, _CORES))
    if everything is None or own is None or cores is None:
        return None
    with np.errstate(invalid="ignore"):
        others = everything - own / cores
    if not np.isfinite(others).any():
        return None
    return float(np.nanmean(everything)) >= _FULL and float(np.nanmean(others)) >= _OTHERS
