"""NVIDIA GPUs through NVML, loaded when first needed. Absent or failing: said once, never fatal.

Which of them are the job's: those that CUDA_VISIBLE_DEVICES lists, else those on which one of its
processes was seen. If one was seen on another GPU than the listed ones, the numbers of CUDA are not
those of NVML, and what was seen counts. Where neither says anything, nobody knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, Final

from tocsin.emitter.sender import say

PROCESSES_EVERY: Final = 10
"""Asking which processes are on a GPU costs more than a reading: each 10th sample asks."""

FAILURES: Final = 5
"""Readings in a row of one device that fail before it is left alone."""


class Gpus:
    """The GPUs of this node. `sample` gives columns `gpu.N.…` for those that answer.

    `visible` is the job's CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, *, visible: str | None = None, tell: Callable[[str], None] = say) -> None:
        self._tell = tell
        self._visible = visible
        self._listed: set[int] = set()
        self._used: set[int] = set()
        self._n = 0
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._failed: dict[int, int] = {}
        self._opened = False

    def sample(self, pids: Collection[int] = ()) -> dict[str, float]:
        """One reading, where the job has the processes `pids`.

        May block as long as the driver does; the first loads it, for seconds.
        """
        if not self._opened:
            self._open()
        found: dict[str, float] = {}
        for n, handle in list(self._handles.items()):
            try:
                found.update(self._read(n, handle))
                if n not in self._used and self._n % PROCESSES_EVERY == 0:
                    self._look_for(pids, n, handle)
                self._failed[n] = 0
            # The wall of a probe, as above.
            except Exception as error:
                self._failed[n] = self._failed.get(n, 0) + 1
                if self._failed[n] >= FAILURES:
                    del self._handles[n]
                    self._tell(f"GPU {n} is not sampled any more: {error}")
        self._n += 1
        if own := self._listed if self._used <= self._listed else self._used:
            found.update((f"gpu.{n}.of_job", float(n in own)) for n in self._handles)
        return found

    def close(self) -> None:
        """Let go of NVML, for good."""
        self._opened = True
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles = {}

    def _open(self) -> None:
        self._opened = True
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = {
                n: pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())
            }
            self._nvml = pynvml
            self._listed = self._among(self._visible)
        # The wall of a probe: a driver can fail in any way.
        except Exception as error:
            # No driver is what most machines without a GPU have: nothing to say.
            if type(error).__name__ not in (
                "NVMLError_LibraryNotFound",
                "NVMLError_DriverNotLoaded",
                "NVMLError_NoDevice",
            ):
                self._tell(f"GPUs are not sampled: {error}")

    def _among(self, visible: str | None) -> set[int]:
        """The GPUs of such a list: numbers, or the beginnings of UUIDs (`GPU-8c8e…`)."""
        words = [word.strip() for word in (visible or "").split(",") if word.strip()]
        if all(word.isdigit() for word in words):
            return {int(word) for word in words} & set(self._handles)
        uuids = {n: str(self._nvml.nvmlDeviceGetUUID(h)) for n, h in self._handles.items()}
        return {n for n, uuid in uuids.items() if any(map(uuid.startswith, words))}

    def _look_for(self, pids: Collection[int], n: int, handle: Any) -> None:
        with contextlib.suppress(self._nvml.NVMLError_NotSupported):
            there = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if any(process.pid in pids for process in there):
                self._used.add(n)

    def _read(self, n: int, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        found = {
            f"gpu.{n}.memory_used_bytes": float(memory.used),
            f"gpu.{n}.memory_total_bytes": float(memory.total),
        }
        # Which of these there are differs by model and by virtualisation.
        for name, read in (
            ("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            (
                "temperature_celsius",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            ("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            (
                "sm_clock_hertz",
                lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            ),
        ):
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                found[f"gpu.{n}.{name}"] = float(read())  # type: ignore[no-untyped-call]
        return found
