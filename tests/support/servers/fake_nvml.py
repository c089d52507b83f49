"""NVML with made devices: the real module, its constants and its errors, with other answers.

What a device says is in the fields of `FakeGpu`; a test changes them between two readings. `fails`
has an error code of NVML for a function, as the driver would return it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 1 << 30
THERMAL = 0x20
POWER_BRAKE = 0x80


@dataclass
class FakeGpu:
    """One device."""

    busy: int = 95
    memory_busy: int = 40
    used: int = 40 * GIB
    total: int = 80 * GIB
    celsius: int = 65
    milliwatts: int = 400_000
    sm_mhz: int = 1980
    memory_mhz: int = 2600
    throttled: int = 0
    corrected: int = 0
    uncorrected: int = 0
    retired: tuple[int, int] = (0, 0)
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    place: str = "00000000:17:00.0"
    processes: Sequence[tuple[int, int]] = ()
    fails: dict[str, int] = field(default_factory=dict)


def install(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[FakeGpu]) -> ModuleType:
    """Put it in the place of pynvml. Functions that no device here answers say so as the driver
    does: not supported."""
    fake = ModuleType("pynvml")
    vars(fake).update({name: value for name, value in vars(pynvml).items() if name[:2] != "__"})
    for name in vars(pynvml):
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            setattr(fake, name, _refuse)
    for name, answer in _ANSWERS.items():
        setattr(fake, name, _asking(name, answer))
    fake.nvmlInit = lambda: None  # type: ignore[attr-defined]
    fake.nvmlShutdown = lambda: None  # type: ignore[attr-defined]
    fake.nvmlDeviceGetCount = lambda: len(gpus)  # type: ignore[attr-defined]
    fake.nvmlDeviceGetHandleByIndex = lambda n: gpus[n]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def _refuse(*asked: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _asking(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    def ask(gpu: FakeGpu, *more: object) -> Any:
        if name in gpu.fails:
            raise pynvml.NVMLError(gpu.fails[name])
        return answer(gpu, *more)

    return ask


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetUtilizationRates": lambda g: SimpleNamespace(gpu=g.busy, memory=g.memory_busy),
    "nvmlDeviceGetMemoryInfo": lambda g: SimpleNamespace(used=g.used, total=g.total),
    "nvmlDeviceGetTemperature": lambda g, kind: g.celsius,
    "nvmlDeviceGetPowerUsage": lambda g: g.milliwatts,
    "nvmlDeviceGetEnforcedPowerLimit": lambda g: 700_000,
    "nvmlDeviceGetClockInfo": lambda g, kind: (
        g.sm_mhz if kind == pynvml.NVML_CLOCK_SM else g.memory_mhz
    ),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda g: g.throttled,
    "nvmlDeviceGetTotalEccErrors": lambda g, kind, counter: (
        g.corrected if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED else g.uncorrected
    ),
    "nvmlDeviceGetRetiredPages": lambda g, cause: list(range(g.retired[cause])),
    "nvmlDeviceGetRemappedRows": lambda g: g.remapped,
    "nvmlDeviceGetUUID": lambda g: f"GPU-{g.place}",
    "nvmlDeviceGetPciInfo": lambda g: SimpleNamespace(busId=g.place),
    "nvmlDeviceGetComputeRunningProcesses": lambda g: [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in g.processes
    ],
}
