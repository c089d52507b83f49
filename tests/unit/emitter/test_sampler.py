from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from support.waiting import until
from tocsin.emitter.gpus import FAILURES, PROCESSES_EVERY, Gpus
from tocsin.emitter.sampler import Node, Packer, Sampler
from tocsin.schemas.telemetry import Speaker, SystemFrame

SPEAKER = Speaker(run_id="r1", incarnation="i1")


def test_a_sample_of_this_node(tmp_path: Path) -> None:
    node = Node(root_pid=os.getpid(), folder=tmp_path)
    first = node.sample(10.0)
    sum(range(200_000))
    second = node.sample(10.5)
    assert "cpu.percent" not in first
    assert 0 <= second["cpu.percent"] <= 100
    assert second["cpu.process_tree_percent"] >= 0
    assert second["memory.process_tree_bytes"] > 10_000_000
    assert 0 < second["memory.used_bytes"] < second["memory.total_bytes"]
    assert 0 < second["disk.free_bytes"] <= second["disk.total_bytes"]


def test_a_job_that_has_ended_has_no_columns() -> None:
    node = Node(root_pid=2**22 + 1)
    assert "memory.process_tree_bytes" not in node.sample(1.0)


def test_samples_are_packed_until_columns_change() -> None:
    packer = Packer(SPEAKER, "node-1", packed_s=2.0)
    assert packer.add({"a": 1.0, "b": 2.0}, 0) == []
    assert packer.add({"b": 3.0, "a": 4.0}, 500_000) == []
    (frame,) = packer.add({"a": 5.0, "b": 6.0}, 2_000_000)
    assert frame.columns == ("a", "b")
    assert frame.values.tolist() == [[1.0, 2.0], [4.0, 3.0]]
    (other,) = packer.add({"a": 7.0}, 2_100_000)
    assert other.values.tolist() == [[5.0, 6.0]]
    (last,) = packer.flush()
    assert (last.columns, last.values.tolist()) == (("a",), [[7.0]])
    assert packer.flush() == []


async def test_the_loop_hands_on_what_is_left_when_it_is_cancelled() -> None:
    sent: list[SystemFrame] = []
    packer = Packer(SPEAKER, "n", packed_s=0.03)
    task = asyncio.create_task(Sampler(Node(), packer, sent.append, interval_s=0.01).run())
    await until(lambda: sent)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(len(frame.at_us) for frame in sent) >= 2


class NotSupported(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **more: object) -> ModuleType:
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
        "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=42),
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


def test_gpu_columns_leave_out_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: object) -> None:
        raise NotSupported

    fake_nvml(monkeypatch, nvmlDeviceGetPowerUsage=refuse)
    gpus = Gpus()
    found = gpus.sample()
    assert found["gpu.0.utilization_percent"] == 42
    assert found["gpu.0.memory_used_bytes"] == 5
    assert found["gpu.0.sm_clock_hertz"] == 1.5e9
    assert "gpu.0.power_watts" not in found
    gpus.close()
    assert gpus.sample() == {}


def test_a_gpu_that_falls_off_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(handle: object) -> None:
        raise OSError("GPU is lost")

    fake_nvml(monkeypatch, nvmlDeviceGetMemoryInfo=lost)
    told: list[str] = []
    gpus = Gpus(tell=told.append)
    for _ in range(FAILURES + 5):
        assert gpus.sample() == {}
    assert told == ["GPU 0 is not sampled any more: GPU is lost"]


def of_job(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name.endswith("of_job")}


def test_the_gpus_of_the_job_are_those_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {0: [], 1: [SimpleNamespace(pid=77)], 2: [SimpleNamespace(pid=1234)]}
    fake_nvml(
        monkeypatch,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetComputeRunningProcesses=lambda h: there[h],
    )
    gpus = Gpus()
    assert of_job(gpus.sample({1, 2})) == {}
    for _ in range(PROCESSES_EVERY):
        found = of_job(gpus.sample({77}))
    assert found == {"gpu.0.of_job": 0, "gpu.1.of_job": 1, "gpu.2.of_job": 0}
    listed = Gpus(visible="0,1").sample({77})
    assert of_job(listed) == {"gpu.0.of_job": 1, "gpu.1.of_job": 1, "gpu.2.of_job": 0}
    wrong = Gpus(visible="0,1").sample({1234})
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
    assert of_job(Gpus(visible=visible).sample()) == expected
