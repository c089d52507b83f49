"""What a node did while a step took long: its last samples, those that can explain it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import SystemFrame
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Input, system

SIGNS: Final = {
    "io_wait": ("cpu.iowait_percent", "pressure.io_some_percent"),
    "cpu_throttle": ("cpu.throttled_percent",),
    "memory_pressure": ("pressure.memory_some_percent",),
    "gpu_throttle": ("gpu.*.throttled_thermal", "gpu.*.throttled_power_brake"),
    "busy_cpu": ("pressure.cpu_some_percent",),
}
"""A cause, and the columns that show it. Where several are there the highest counts."""

INPUTS: Final[tuple[Input, ...]] = tuple(
    system(name, optional=True) for names in SIGNS.values() for name in names
)
_KEPT: Final = 1200
_MORE: Final = 10.0
"""Percentage points by which a sign must be higher than else, and twice as high."""


@dataclass(slots=True)
class NodeContext:
    """The samples of one node: that of the leading rank, or the first that speaks."""

    node: str = ""
    times_us: StateArray = field(default_factory=lambda: np.zeros(0, np.int64))
    values: StateArray = field(default_factory=lambda: np.zeros((0, len(SIGNS))))

    def add(self, frame: SystemFrame) -> None:
        """Take samples in; signs that are not there are NaN."""
        if self.node and frame.node != self.node:
            return
        self.node = frame.node
        found = np.full((len(frame.at_us), len(SIGNS)), np.nan)
        for j, (sign, patterns) in enumerate(SIGNS.items()):
            scale = 100.0 if sign == "gpu_throttle" else 1.0
            for name in frame.columns:
                if any(fnmatchcase(name, pattern) for pattern in patterns):
                    column = frame.column(name)
                    assert column is not None
                    found[:, j] = np.fmax(found[:, j], scale * column)
        times = frame.at_us.astype(np.int64)
        self.times_us = np.concatenate([self.times_us, times])[-_KEPT:]
        self.values = np.vstack([self.values, found])[-_KEPT:]

    def signs(self, begins_us: Doubles, ends_us: Doubles) -> dict[str, tuple[float, float]]:
        """Signs that were higher in these spans than outside of them: both means, percent."""
        if not len(self.times_us) or not len(begins_us):
            return {}
        # A sample is about the time since the one before.
        every = float(np.median(np.diff(self.times_us))) if len(self.times_us) > 1 else 0.0
        times = self.times_us[:, None]
        inside = ((times >= begins_us) & (times - every <= ends_us)).any(axis=1)
        if not inside.any() or inside.all():
            return {}
        found: dict[str, tuple[float, float]] = {}
        for j, sign in enumerate(SIGNS):
            here, there = self.values[inside, j], self.values[~inside, j]
            if np.isnan(here).all() or np.isnan(there).all():
                continue
            high, low = float(np.nanmean(here)), float(np.nanmean(there))
            if high >= max(2 * low, low + _MORE):
                found[sign] = (high, low)
        return found
