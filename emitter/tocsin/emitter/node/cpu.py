"""The processors: how busy they are, all together and one by one, and the load averages.

Columns: `cpu.percent` (of all cores), `cpu.iowait_percent`, `cpu.cores` (online), `cpu.N.percent`
for up to `MAX_CORES` cores; for any number `cpu.busiest_percent`, `cpu.p95_percent` (nearest rank)
and `cpu.least_busy_percent` of the cores; `load.1m`, `load.5m`, `load.15m`. A machine with more
cores has no column per core: hundreds of columns would show little more than those three.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Sample

MAX_CORES: Final = 64

_FIELDS: Final = 8
"""user nice system idle iowait irq softirq steal; guest time stands in user already."""

_Times = tuple[int, int]


class CpuSamples:
    """Reads /proc/stat and /proc/loadavg; percentages are since the reading before."""

    def __init__(self, root: Path = ROOT) -> None:
        self._stat = ProcFile(root / "proc/stat", size=1 << 16)
        self._load = ProcFile(root / "proc/loadavg")
        self._before: dict[bytes, _Times] = {}
        self._iowait = 0

    def read(self, now_s: float) -> Sample:
        """One reading. Raises ValueError if a file is not what it has been for decades."""
        found: Sample = {}
        self._percentages(found)
        load = self._load.read()
        if load is not None:
            for name, word in zip(("1m", "5m", "15m"), load.split(), strict=False):
                found[f"load.{name}"] = float(word)
        return found

    def _percentages(self, found: Sample) -> None:
        text = self._stat.read()
        if text is None:
            return
        times: dict[bytes, _Times] = {}
        iowait = 0
        for line in text.splitlines():
            if not line.startswith(b"cpu"):
                break
            words = line.split(None, _FIELDS + 1)
            numbers = [int(word) for word in words[1 : _FIELDS + 1]]
            idle = numbers[3] + numbers[4]
            times[words[0]] = sum(numbers), idle
            if words[0] == b"cpu":
                iowait = numbers[4]
        before, self._before = self._before, times
        iowait_before, self._iowait = self._iowait, iowait
        busy = {}
        for name, (total, idle) in times.items():
            # A core that has just come online has no time before.
            if (earlier := before.get(name)) is not None:
                passed = total - earlier[0]
                # The idle time of a core can go back a little.
                share = 1 - (idle - earlier[1]) / passed if passed > 0 else 0.0
                busy[name] = 100 * min(1.0, max(0.0, share))
        all_cores = busy.pop(b"cpu", None)
        if all_cores is None:
            return
        found["cpu.percent"] = all_cores
        passed = times[b"cpu"][0] - before[b"cpu"][0]
        waited = max(0, iowait - iowait_before)
        found["cpu.iowait_percent"] = min(100.0, 100 * waited / passed) if passed > 0 else 0.0
        found["cpu.cores"] = float(len(times) - 1)
        if not busy:
            return
        ordered = sorted(busy.values())
        found["cpu.busiest_percent"] = ordered[-1]
        found["cpu.p95_percent"] = ordered[math.ceil(0.95 * len(ordered)) - 1]
        found["cpu.least_busy_percent"] = ordered[0]
        if len(ordered) <= MAX_CORES:
            for name, percent in busy.items():
                found[f"cpu.{name[3:].decode()}.percent"] = percent
