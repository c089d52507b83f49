"""What the node does: memory, disk, GPUs."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.system.disk_full import DiskFull
from tocsin.stream_rules.system.host_memory_increase import HostMemoryIncrease
from tocsin.stream_rules.system.low_gpu_utilization import LowGpuUtilization

RULES: Final[tuple[type[AnyRule], ...]] = (
    HostMemoryIncrease,
    DiskFull,
    LowGpuUtilization,
)
