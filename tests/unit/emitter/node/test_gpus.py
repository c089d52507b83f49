"""GPUs through NVML, from made modules: what is there, what is not, what fails."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tocsin.emitter.node.gpus import RARELY, Gpus, GpusOfJob
from tocsin.emitter.node.sources import FAILURES, Sample


class NotSupported(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **more: object) -> ModuleType:
    """One that has only what every driver has."""
    nvml = ModuleType("pynvml")
    parts: dict[str, object] = {
        "NVMLError_NotSupported": NotSupported,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda n: n,
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(used=5, total=10),
        "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=42, memory=7),
        "nvmlDeviceGetTemperature": lambda h, kind: 61,
        "nvmlDeviceGetPowerUsage": lambda h: 250_000,
        "nvmlDeviceGetClockInfo": lambda h, kind: 1_500,
        "nvmlDeviceGetComputeRunningProcesses": lambda h: [],
        "nvmlDeviceGetUUID": lambda h: f"GPU-{h}{h}{h}-a",
        **more,
    }
    for name, value in parts.items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


FULL = {
    "NVML_CLOCK_MEM": 2,
    "NVML_PCIE_UTIL_TX_BYTES": 0,
    "NVML_PCIE_UTIL_RX_BYTES": 1,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_PAGE_RETIREMENT_CAUSE_COUNT": 2,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 0x40 | 0x04,
    "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
    "nvmlDeviceGetPcieThroughput": lambda h, counter: 10 + counter,
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda h: 5,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda h: 16,
    "nvmlDeviceGetTotalEccErrors": lambda h, kind, counter: 3 + kind,
    "nvmlDeviceGetRetiredPages": lambda h, cause: [1, 2],
    "nvmlDeviceGetRemappedRows": lambda h: (1, 2, 0, 1),
    "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=f"0000000{h}:17:00.0"),
}


def test_columns_of_a_gpu_that_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, **FULL)
    gpus = Gpus()
    assert gpus.read(1.0) == {
        f"gpu.0.{name}": value
        for name, value in {
            "utilization_percent": 42,
            "memory_utilization_percent": 7,
            "memory_used_bytes": 5,
            "memory_total_bytes": 10,
            "temperature_celsius": 61,
            "power_watts": 250,
            "power_limit_watts": 700,
            "sm_clock_hertz": 1.5e9,
            "memory_clock_hertz": 1.5e9,
            "throttled_thermal": 1,
            "throttled_power_brake": 0,
            "throttled_power_cap": 1,
            "throttled_hardware": 0,
            "pcie_sent_bytes_per_s": 10_000,
            "pcie_received_bytes_per_s": 11_000,
            "pcie_link_generation": 5,
            "pcie_link_width": 16,
            "ecc_corrected_errors": 3,
            "ecc_uncorrected_errors": 4,
            "retired_pages": 4,
            "remapped_rows_corrected": 1,
            "remapped_rows_uncorrected": 2,
            "remapping_failed": 1,
        }.items()
    }
    assert gpus.places == {"0000:17:00": 0}


def test_what_is_expensive_is_asked_rarely_and_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def throughput(device: object, counter: int) -> int:
        asked.append(counter)
        return len(asked)

    fake_nvml(monkeypatch, **{**FULL, "nvmlDeviceGetPcieThroughput": throughput})
    gpus = Gpus()
    columns = {tuple(gpus.read(float(n))) for n in range(RARELY)}
    assert len(columns) == 1
    assert len(asked) == 2
    assert gpus.read(99.0)["gpu.0.pcie_sent_bytes_per_s"] == 4000


def test_what_is_not_supported_is_left_out_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def refuse(handle: object) -> None:
        asked.append(handle)
        raise NotSupported

    fake_nvml(monkeypatch, nvmlDeviceGetPowerUsage=refuse)
    gpus = Gpus()
    for _ in range(3):
        found = gpus.read(1.0)
    assert found["gpu.0.utilization_percent"] == 42
    assert found["gpu.0.memory_used_bytes"] == 5
    assert found["gpu.0.sm_clock_hertz"] == 1.5e9
    assert "gpu.0.power_watts" not in found
    assert asked == [0]
    gpus.close()
    assert gpus.read(1.0) == {}


def test_a_gpu_that_falls_off_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise OSError("GPU is lost")

    names = ("MemoryInfo", "UtilizationRates", "Temperature", "PowerUsage", "ClockInfo")
    fake_nvml(monkeypatch, **{f"nvmlDeviceGet{name}": lost for name in names})
    told: list[str] = []
    gpus = Gpus(report=told.append)
    for _ in range(FAILURES + 5):
        assert gpus.read(1.0) == {}
    assert told == ["GPU 0 is not sampled any more: GPU is lost"]


def test_a_gpu_that_was_lost_before_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(n: int) -> int:
        if n == 1:
            raise OSError("GPU is lost")
        return n

    fake_nvml(
        monkeypatch, nvmlDeviceGetCount=lambda: 3, nvmlDeviceGetHandleByIndex=handle
    )  # fmt: skip
    told: list[str] = []
    found = Gpus(report=told.append).read(1.0)
    assert {name.split(".")[1] for name in found} == {"0", "2"}
    assert told == ["GPU 1 is not sampled: GPU is lost"]


def test_a_gpu_that_cannot_tell_its_memory_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(handle: object) -> None:
        raise NotSupported

    fake_nvml(monkeypatch, nvmlDeviceGetMemoryInfo=shared)
    told: list[str] = []
    gpus = Gpus(report=told.append)
    for _ in range(FAILURES + 1):
        found = gpus.read(1.0)
    assert found["gpu.0.temperature_celsius"] == 61
    assert "gpu.0.memory_used_bytes" not in found
    assert told == []


def test_a_reading_that_fails_now_and_then_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()

    def fail(handle: object, kind: int) -> int:
        if next(count) % 3 == 0:
            raise OSError("unknown error")
        return 61

    fake_nvml(monkeypatch, nvmlDeviceGetTemperature=fail)
    told: list[str] = []
    gpus = Gpus(report=told.append)
    for _ in range(6 * FAILURES):
        found = gpus.read(1.0)
    assert found["gpu.0.temperature_celsius"] == 61
    assert told == []


def test_a_reading_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: object, kind: int) -> None:
        raise OSError("unknown error")

    fake_nvml(monkeypatch, nvmlDeviceGetTemperature=fail)
    told: list[str] = []
    gpus = Gpus(report=told.append)
    for _ in range(FAILURES + 5):
        found = gpus.read(1.0)
        assert found["gpu.0.power_watts"] == 250
        assert "gpu.0.temperature_celsius" not in found
    assert told == ["GPU 0: one of its readings is left out from now on: unknown error"]


def test_a_driver_that_fails_at_once_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("driver and library do not match")

    fake_nvml(monkeypatch, nvmlInit=fail)
    told: list[str] = []
    gpus = Gpus(report=told.append)
    assert [gpus.read(1.0), gpus.read(2.0)] == [{}, {}]
    assert told == ["GPUs are not sampled: driver and library do not match"]


def test_no_driver_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError_LibraryNotFound(Exception):
        pass

    def fail() -> None:
        raise NVMLError_LibraryNotFound

    fake_nvml(monkeypatch, nvmlInit=fail)
    told: list[str] = []
    assert Gpus(report=told.append).read(1.0) == {}
    assert told == []


def of_job(found: Sample) -> Sample:
    return {name: value for name, value in found.items() if name.endswith("of_job")}


def process(pid: int, size: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=size)


def test_the_gpus_of_the_job_are_those_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {0: [], 1: [process(77, 5), process(78), process(1)], 2: [process(1234)]}
    fake_nvml(
        monkeypatch,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetComputeRunningProcesses=lambda h: there[h],
    )
    gpus = Gpus()
    job = GpusOfJob(gpus)
    assert job.sample({77}) == {}
    gpus.read(1.0)
    assert job.sample({76}) == {}
    assert job.sample({77, 78}) == {
        "gpu.1.job_processes": 2, "gpu.1.job_memory_bytes": 5,
        "gpu.0.of_job": 0, "gpu.1.of_job": 1, "gpu.2.of_job": 0,
    }  # fmt: skip
    # Its GPU stays its own when its processes have gone.
    assert job.sample(())["gpu.1.job_processes"] == 0
    listed = GpusOfJob(gpus, visible="0,1").sample({77})
    assert of_job(listed) == {"gpu.0.of_job": 1, "gpu.1.of_job": 1, "gpu.2.of_job": 0}
    wrong = GpusOfJob(gpus, visible="0,1").sample({1234})
    assert of_job(wrong) == {"gpu.0.of_job": 0, "gpu.1.of_job": 0, "gpu.2.of_job": 1}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {}),
        ("", {}),
        ("1", {"gpu.0.of_job": 0, "gpu.1.of_job": 1}),
        ("GPU-000", {"gpu.0.of_job": 1, "gpu.1.of_job": 0}),
        ("7", {}),
    ],
)
def test_the_job_has_the_gpus_that_it_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: dict[str, float]
) -> None:
    fake_nvml(monkeypatch, nvmlDeviceGetCount=lambda: 2)
    gpus = Gpus()
    gpus.read(1.0)
    assert of_job(GpusOfJob(gpus, visible=visible).sample(())) == expected
