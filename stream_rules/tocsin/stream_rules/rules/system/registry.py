"""The rules on the node that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.system.batch_size import BatchSize
from tocsin.stream_rules.rules.system.cpu_bottleneck import CpuBottleneck
from tocsin.stream_rules.rules.system.dataloader import Dataloader
from tocsin.stream_rules.rules.system.disk_full import DiskFull
from tocsin.stream_rules.rules.system.gpu_hardware_error import GpuHardwareError
from tocsin.stream_rules.rules.system.gpu_memory_increase import GpuMemoryIncrease
from tocsin.stream_rules.rules.system.gpu_thermal_throttle import GpuThermalThrottle
from tocsin.stream_rules.rules.system.host_memory_increase import HostMemoryIncrease
from tocsin.stream_rules.rules.system.io_bottleneck import IoBottleneck
from tocsin.stream_rules.rules.system.load_balancing import LoadBalancing
from tocsin.stream_rules.rules.system.low_gpu_utilization import LowGpuUtilization
from tocsin.stream_rules.rules.system.straggler_rank import StragglerRank

RULES: Final[tuple[type[AnyRule], ...]] = (
    GpuHardwareError,
    GpuThermalThrottle,
    HostMemoryIncrease,
    DiskFull,
    GpuMemoryIncrease,
    Dataloader,
    StragglerRank,
    CpuBottleneck,
    IoBottleneck,
    LoadBalancing,
    LowGpuUtilization,
    BatchSize,
)
