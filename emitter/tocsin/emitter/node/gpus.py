"""NVIDIA GPUs through NVML, loaded when first needed. Absent or failing: reported once, never
fatal.

Columns of `gpu.N.`, each where the model and its virtualisation have it: `utilization_percent`,
`memory_utilization_percent` (time in which memory was read or written), `memory_used_bytes`,
`memory_total_bytes`, `temperature_celsius`, `power_watts`, `power_limit_watts`, `sm_clock_hertz`,
`memory_clock_hertz`; 0 or 1: `throttled_thermal`, `throttled_power_brake`, `throttled_power_cap`,
`throttled_hardware`. Less often: `pcie_received_bytes_per_s`, `pcie_sent_bytes_per_s`,
`pcie_link_generation`, `pcie_link_width`; counts `ecc_corrected_errors`, `ecc_uncorrected_errors`
(since the driver was loaded), `retired_pages`, `remapped_rows_corrected`,
`remapped_rows_uncorrected`, and `remapping_failed` (0 or 1).
Of one job (`GpusOfJob`): `of_job` (0 or 1), `job_processes`, `job_memory_bytes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from tocsin.emitter.node.kernel_log import bus_place
from tocsin.emitter.node.sources import FAILURES, Sample
from tocsin.emitter.process.stderr import print_line

RARELY: Final = 10
"""PCIe traffic takes NVML 20 ms and more, and errors are few: each 10th reading asks."""

_THROTTLED: Final = {
    "throttled_thermal": 0x20 | 0x40,  # by software, by hardware
    "throttled_power_brake": 0x80,
    "throttled_power_cap": 0x04,
    "throttled_hardware": 0x08,
}
"""NVML's bits of why the clocks are lower than they could be."""

_KILO: Final = 1000.0
_MEGA: Final = 1e6

_Read = Callable[[Any, Any], Mapping[str, float]]
"""Asks NVML about a device: the module and the handle in, columns without `gpu.N.` out."""


def _memory(nvml: Any, device: Any) -> Mapping[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _rates(nvml: Any, device: Any) -> Mapping[str, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(device)
    return {"utilization_percent": rates.gpu, "memory_utilization_percent": rates.memory}


def _throttled(nvml: Any, device: Any) -> Mapping[str, float]:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
    return {name: float(bool(reasons & bits)) for name, bits in _THROTTLED.items()}


def _remapped(nvml: Any, device: Any) -> Mapping[str, float]:
    corrected, uncorrected, _, failed = nvml.nvmlDeviceGetRemappedRows(device)
    return {
        "remapped_rows_corrected": corrected,
        "remapped_rows_uncorrected": uncorrected,
        "remapping_failed": failed,
    }


_OFTEN: Final[tuple[_Read, ...]] = (
    _memory,
    _rates,
    lambda nvml, device: {
        "temperature_celsius": nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
    },
    lambda nvml, device: {"power_watts": nvml.nvmlDeviceGetPowerUsage(device) / _KILO},
    lambda nvml, device: {
        "sm_clock_hertz": _MEGA * nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
    },
    lambda nvml, device: {
        "memory_clock_hertz": _MEGA * nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)
    },
    _throttled,
)
_SELDOM: Final[tuple[_Read, ...]] = (
    lambda nvml, device: {
        "power_limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(device) / _KILO
    },
    lambda nvml, device: {
        "pcie_received_bytes_per_s": _KILO
        * nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_RX_BYTES)
    },
    lambda nvml, device: {
        "pcie_sent_bytes_per_s": _KILO
        * nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_TX_BYTES)
    },
    lambda nvml, device: {
        "pcie_link_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
        "pcie_link_width": nvml.nvmlDeviceGetCurrPcieLinkWidth(device),
    },
    lambda nvml, device: {
        "ecc_corrected_errors": nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "ecc_uncorrected_errors": nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    },
    lambda nvml, device: {
        "retired_pages": sum(
            len(nvml.nvmlDeviceGetRetiredPages(device, cause))
            for cause in range(nvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)
        )
    },
    _remapped,
)


class Gpus:
    """The GPUs of this node. `read` gives columns `gpu.N.…` for those that answer."""

    def __init__(self, *, report: Callable[[str], None] = print_line) -> None:
        self._report = report
        self._n = 0
        self._nvml: Any = None
        self._unsupported: tuple[type[Exception], ...] = ()
        self._handles: dict[int, Any] = {}
        self._lacks: set[tuple[int, _Read]] = set()
        self._troubles: dict[tuple[int, _Read], int] = {}
        self._kept: dict[int, Sample] = {}
        self._failed: dict[int, int] = {}
        self._opened = False
        self.uuids: Mapping[int, str] = {}
        """Of each GPU; beginnings of them may be in CUDA_VISIBLE_DEVICES."""
        self.places: Mapping[str, int] = {}
        """The number of each GPU by its PCI address, as `bus_place` writes it."""
        self.processes: Mapping[int, Mapping[int, int]] = {}
        """The processes on each GPU that answers, with the memory of each, bytes."""

    def read(self, now_s: float) -> Sample:
        """One reading. May block as long as the driver does; the first loads it, for seconds."""
        if not self._opened:
            self._open()
        rarely = self._n % RARELY == 0
        self._n += 1
        found: Sample = {}
        processes: dict[int, Mapping[int, int]] = {}
        for n, handle in list(self._handles.items()):
            try:
                columns = self._read(n, handle, rarely=rarely)
                processes[n] = self._processes(n, handle) if rarely else self.processes.get(n, {})
                self._failed[n] = 0
            # The isolation of a probe: a driver can fail in any way.
            except Exception as error:
                self._failed[n] = self._failed.get(n, 0) + 1
                if self._failed[n] >= FAILURES:
                    del self._handles[n]
                    self._report(f"GPU {n} is not sampled any more: {error}")
                continue
            found.update((f"gpu.{n}.{name}", value) for name, value in columns.items())
        self.processes = processes
        return found

    def close(self) -> None:
        """Let go of NVML, for good."""
        self._opened = True
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles = {}
            self.processes = {}

    def _open(self) -> None:
        self._opened = True
        try:
            import pynvml

            pynvml.nvmlInit()
            self._unsupported = (
                AttributeError,
                pynvml.NVMLError_NotSupported,
                *(
                    getattr(pynvml, name)
                    for name in ("NVMLError_FunctionNotFound", "NVMLError_NoPermission")
                    if hasattr(pynvml, name)
                ),
            )
            count = pynvml.nvmlDeviceGetCount()
            self._nvml = pynvml
            for n in range(count):
                self._add(n)
        # The isolation of a probe, as above.
        except Exception as error:
            # No driver is what most machines without a GPU have: nothing to report.
            if type(error).__name__ not in (
                "NVMLError_LibraryNotFound",
                "NVMLError_DriverNotLoaded",
                "NVMLError_NoDevice",
            ):
                self._report(f"GPUs are not sampled: {error}")

    def _add(self, n: int) -> None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(n)
        # The isolation of a probe: one that has fallen off the bus is no reason to miss the others.
        except Exception as error:
            self._report(f"GPU {n} is not sampled: {error}")
            return
        with contextlib.suppress(Exception):
            self.uuids = {**self.uuids, n: _text(nvml.nvmlDeviceGetUUID(handle))}
        with contextlib.suppress(Exception):
            place = bus_place(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
            self.places = {**self.places, place: n}
        self._handles[n] = handle

    def _read(self, n: int, device: Any, *, rarely: bool) -> Sample:
        found, failed = self._ask(n, device, _OFTEN)
        if failed and not found:
            # Not a reading that this model lacks: the device does not answer.
            raise failed[0]
        if rarely or n not in self._kept:
            self._kept[n], _ = self._ask(n, device, _SELDOM)
        found.update(self._kept[n])
        return found

    def _ask(self, n: int, device: Any, reads: tuple[_Read, ...]) -> tuple[Sample, list[Exception]]:
        """What there is of these differs by model, by virtualisation and by driver."""
        found: Sample = {}
        failed: dict[_Read, Exception] = {}
        for read in reads:
            if (n, read) in self._lacks:
                continue
            try:
                columns = read(self._nvml, device)
            except self._unsupported:
                self._lacks.add((n, read))
                continue
            # The isolation of a probe: where one fails, others of the same device answer.
            except Exception as error:
                failed[read] = error
                continue
            self._troubles.pop((n, read), None)
            found.update((name, float(value)) for name, value in columns.items())
        if found:
            for read, why in failed.items():
                self._count_failure(n, read, why)
        return found, list(failed.values())

    def _count_failure(self, n: int, read: _Read, error: Exception) -> None:
        failed = self._troubles[n, read] = self._troubles.get((n, read), 0) + 1
        if failed == FAILURES:
            self._lacks.add((n, read))
            self._report(f"GPU {n}: one of its readings is left out from now on: {error}")

    def _processes(self, n: int, device: Any) -> Mapping[int, int]:
        try:
            there = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
        except self._unsupported:
            return {}
        return {process.pid: getattr(process, "usedGpuMemory", None) or 0 for process in there}


class GpusOfJob:
    """Which of the GPUs are a job's, and what it has there.

    Those that its CUDA_VISIBLE_DEVICES (`visible`) lists, else those on which one of its processes
    was seen. If one was seen on another GPU than the listed ones, the numbers of CUDA are not those
    of NVML, and what was seen counts. Where neither has it, nobody knows.
    """

    def __init__(self, gpus: Gpus, *, visible: str | None = None) -> None:
        self.visible = visible
        self._gpus = gpus
        self._used: set[int] = set()

    def sample(self, pids: Collection[int]) -> Sample:
        """The columns, for a job that has the processes `pids`."""
        there = self._gpus.processes
        found: Sample = {}
        for n, processes in there.items():
            own = [size for pid, size in processes.items() if pid in pids]
            if own:
                self._used.add(n)
            if n in self._used:
                found[f"gpu.{n}.job_processes"] = float(len(own))
                found[f"gpu.{n}.job_memory_bytes"] = float(sum(own))
        listed = self._listed()
        if own_gpus := listed if self._used <= listed else self._used:
            found.update((f"gpu.{n}.of_job", float(n in own_gpus)) for n in there)
        return found

    def _listed(self) -> set[int]:
        """The GPUs of the list: numbers, or the beginnings of UUIDs (`GPU-8c8e…`)."""
        words = [word.strip() for word in (self.visible or "").split(",") if word.strip()]
        if all(word.isdigit() for word in words):
            return {int(word) for word in words} & set(self._gpus.processes)
        return {n for n, uuid in self._gpus.uuids.items() if any(map(uuid.startswith, words))}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
