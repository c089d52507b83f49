"""`gpu_memory_increase`, `gpu_thermal_throttle`, `gpu_hardware_error`, from a made NVML, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pynvml
import pytest

from support.records.node_samples import (
    Columns,
    Samples,
    add_samples,
    gpu,
    restarted,
    run_of,
    sagemaker,
    told,
)
from support.records.traces import Line, add_trace, read, recorded, write
from support.servers import fake_nvml
from support.servers.fake_nvml import GIB, THERMAL, FakeGpu
from tocsin.emitter.node.gpus import RARELY, Gpus
from tocsin.emitter.node.kernel_log import XidSamples
from tocsin.emitter.node.sampler import Node
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

MEMORY = only("gpu_memory_increase")
HEAT = only("gpu_thermal_throttle")
ERRORS = only("gpu_hardware_error")
SYSTEM = tuple(spec for spec in rule_specs() if spec.rule.meta.family == "system")
TINY = 0.2


def run(columns: Columns, *, steps: bool = True) -> RunBuilder:
    return run_of(columns, steps=steps, frame=50)


def memory(percent: Samples) -> RunBuilder:
    noise = TINY * np.random.default_rng(0).standard_normal(len(percent))
    return run(gpu(95.0, memory_percent=np.asarray(percent) + noise))


def branches(made: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[tuple[str, str, str]]:
    issues = issues_of(made.records, specs=specs)
    return [(i.branch, i.severity, i.state) for i in issues if i.state != "ongoing"]


# -- gpu_memory_increase


def test_memory_that_will_be_full() -> None:
    made = memory(np.linspace(40, 60, 1600))
    assert branches(made, MEMORY) == [("predicted", "warning", "firing")]
    (issue,) = [i for i in issues_of(made.records, specs=MEMORY) if i.state == "firing"]
    assert issue.subject.name == "gpu 0 of node"
    assert "of 74.5 GiB of gpu 0 of node are in use" in issue.reason


def test_a_step_is_an_info_and_over_when_windows_are_alike() -> None:
    made = memory(np.repeat([30.0, 50.0], [1200, 2400]))
    assert branches(made, MEMORY) == [("step", "info", "firing"), ("step", "info", "resolved")]


@pytest.mark.parametrize(
    "percent",
    [
        pytest.param(np.full(2400, 97.0), id="nearly full, and constant"),
        pytest.param(np.repeat([50.0, 53.0], 1200), id="a small step"),
        pytest.param(10 + 4 * np.log1p(np.arange(4000)), id="an allocator that settles"),
        pytest.param(50 + 3 * np.sin(np.arange(4000) / 30), id="up and down"),
        pytest.param(np.linspace(40, 90, 400), id="a short run"),
        pytest.param(np.full(1200, math.nan), id="all NaN"),
    ],
)
def test_memory_left_alone(percent: Samples) -> None:
    assert told(memory(percent), MEMORY) == []


def test_what_grows_before_the_first_step_is_left_out() -> None:
    made = run(gpu(95.0, memory_percent=np.linspace(1, 80, 1100)), steps=False)
    assert told(made, MEMORY) == []


def test_it_fires_under_the_defaults_of_the_reference() -> None:
    # There the two windows share all but one sample: their means differ by 0.04 points here.
    made = memory(np.repeat([30.0, 50.0], 1200))
    assert branches(made, sagemaker("GPUMemoryIncrease"))[0] == ("step", "info", "firing")


# -- gpu_thermal_throttle


def clocks(thermal: Samples, brake: Samples | float = 0.0, **more: Samples | float) -> RunBuilder:
    held = (np.asarray(thermal) > 0) | (np.asarray(brake) > 0)
    return run(
        {
            "gpu.0.throttled_thermal": thermal,
            "gpu.0.throttled_power_brake": brake,
            "gpu.0.sm_clock_hertz": np.where(held, 1.2e9, 1.98e9),
            "gpu.0.temperature_celsius": np.where(held, 88.0, 70.0),
            **{f"gpu.0.{name}": value for name, value in more.items()},
        }
    )


def test_a_gpu_that_is_too_hot() -> None:
    issue = assert_fires(clocks(np.ones(200)).records, "gpu_thermal_throttle", specs=HEAT)
    assert (issue.severity, issue.branch) == ("warning", "thermal")
    assert issue.reason.endswith("at 1,200 MHz, because it is too hot (88 °C)")
    late = clocks(np.repeat([0.0, 1.0], 150))
    assert "at 1,200 of 1,980 MHz" in issues_of(late.records, specs=HEAT)[0].reason


def test_a_clock_that_is_held_a_little_is_an_info() -> None:
    held = np.repeat([0.0, 1.0], 150)
    made = clocks(held, sm_clock_hertz=np.where(held > 0, 1.8e9, 1.98e9))
    assert branches(made, HEAT) == [("thermal", "info", "firing")]


def test_a_power_brake_is_another_branch_and_resolves() -> None:
    brake = np.repeat([0.0, 1.0, 0.0], [100, 100, 400])
    assert branches(clocks(np.zeros(600), brake), HEAT) == [
        ("power_brake", "warning", "firing"),
        ("power_brake", "warning", "resolved"),
    ]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(clocks(np.zeros(500)), id="cool"),
        pytest.param(clocks(np.ones(100)), id="a short run"),
        pytest.param(clocks((np.arange(600) % 10 == 0).astype(float)), id="now and then"),
        pytest.param(clocks(np.zeros(500), throttled_power_cap=1.0), id="at its power limit"),
        pytest.param(clocks(np.ones(500), of_job=0.0), id="somebody else's"),
        pytest.param(clocks(np.full(500, math.nan)), id="all NaN"),
    ],
)
def test_clocks_left_alone(made: RunBuilder) -> None:
    assert told(made, HEAT) == []


# -- gpu_hardware_error


def errors(**counts: Samples | float) -> RunBuilder:
    return run({f"gpu.0.{name}": value for name, value in counts.items()})


def test_new_memory_errors_are_critical_and_never_stop_a_run() -> None:
    made = errors(ecc_uncorrected_errors=np.repeat([2.0, 3.0, 5.0], 60))
    issue = assert_fires(made.records, "gpu_hardware_error", specs=ERRORS)
    assert (issue.severity, issue.branch, issue.stop_worthy) == ("critical", "ecc", False)
    assert "1 new uncorrectable memory errors" in issue.reason


def test_pages_that_are_retired() -> None:
    made = errors(retired_pages=np.repeat([4.0, 5.0], 60), remapping_failed=np.zeros(120))
    assert branches(made, ERRORS) == [("retired_pages", "critical", "firing")]
    made = errors(remapping_failed=np.repeat([0.0, 1.0], 60))
    assert branches(made, ERRORS) == [("retired_pages", "critical", "firing")]


@pytest.mark.parametrize(
    ("xid", "severity"), [(79.0, "critical"), (48.0, "critical"), (31.0, "warning")]
)
def test_some_xids_are_most_often_of_a_program(xid: float, severity: str) -> None:
    made = errors(xids=np.repeat([0.0, 1.0], 60), xid=np.repeat([0.0, xid], 60))
    (issue,) = [i for i in issues_of(made.records, specs=ERRORS) if i.state == "firing"]
    assert (issue.branch, issue.severity) == ("xid", severity)
    assert f"(Xid) since this run began: {xid:.0f}, " in issue.reason


def late(xids: Samples, *, begun: bool = True, wait_s: float = 60.0) -> RunBuilder:
    """A node that is first sampled so long after the run began."""
    made = RunBuilder()
    if begun:
        made.started()
    else:
        made.lose()
    made.steps([0], loss=1.0)
    made.wait(wait_s)
    add_samples(made, {"gpu.0.xids": xids, "gpu.0.xid": 79.0}, frame=50)
    return made


def test_the_first_count_of_a_sampler_that_is_older_than_the_run_is_no_news() -> None:
    assert told(late(np.full(100, 3.0)), ERRORS) == []
    assert told(late(np.full(100, 3.0), begun=False, wait_s=0.0), ERRORS) == []
    assert told(late(np.full(100, 3.0), wait_s=10.0), ERRORS) == [("critical", "firing")]
    (issue,) = [
        i for i in issues_of(late(np.repeat([3.0, 4.0], 60)).records, specs=ERRORS)
        if i.state == "firing"
    ]  # fmt: skip
    assert "reports 1 new errors" in issue.reason


def test_a_run_that_is_restarted_under_its_launcher_has_no_errors_of_the_one_before() -> None:
    made = RunBuilder()
    made.started(role="launcher")
    made.started()
    add_samples(made, {"gpu.0.xids": np.repeat([0.0, 1.0], 60), "gpu.0.xid": 79.0}, frame=50)
    made.ended(outcome="failed")
    made.incarnation = "made-2"
    made.started()
    add_samples(made, {"gpu.0.xids": np.full(100, 1.0), "gpu.0.xid": 79.0}, frame=50)
    issues = issues_of(made.records, specs=ERRORS)
    assert {i.incarnation for i in issues} == {"made-1"}


def test_what_a_gpu_had_before_the_job_took_it_is_no_news() -> None:
    of_job = np.repeat([0.0, 1.0], 100)
    made = errors(xids=np.repeat([0.0, 2.0, 2.0, 2.0], 50), xid=79.0, of_job=of_job)
    assert told(made, ERRORS) == []


def test_an_xid_whose_number_is_not_known_has_none() -> None:
    for xid in (0.0, math.nan):
        made = errors(xids=np.repeat([0.0, 1.0], 60), xid=np.full(120, xid))
        issue = assert_fires(made.records, "gpu_hardware_error", specs=ERRORS)
        assert issue.severity == "critical"
        assert issue.reason.endswith("since this run began")


def test_a_graver_one_later_raises_it() -> None:
    made = errors(xids=np.repeat([0.0, 1.0, 2.0], 60), xid=np.repeat([0.0, 31.0, 79.0], 60))
    assert [i.severity for i in issues_of(made.records, specs=ERRORS)] == ["warning", "critical"]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(errors(ecc_uncorrected_errors=np.full(100, 7.0)), id="from before the run"),
        pytest.param(errors(ecc_corrected_errors=np.arange(100.0)), id="corrected"),
        pytest.param(errors(retired_pages=np.full(100, 3.0), xids=0.0, xid=0.0), id="old pages"),
        pytest.param(errors(ecc_uncorrected_errors=np.full(100, math.nan)), id="all NaN"),
        pytest.param(
            errors(ecc_uncorrected_errors=np.repeat([1.0, 2.0], 50), of_job=0.0), id="not the job's"
        ),
    ],
)
def test_devices_without_news(made: RunBuilder) -> None:
    assert told(made, ERRORS) == []


def test_repeated_and_late_samples_are_no_new_errors() -> None:
    made = errors(ecc_uncorrected_errors=np.repeat([0.0, 1.0], 100))
    made.again(made.records[2])
    made.again(made.records[-1])
    (issue,) = [i for i in issues_of(made.records, specs=ERRORS) if i.state == "firing"]
    assert issue.evidence.facts[1].value == 1.0


@pytest.mark.parametrize(
    ("made", "specs"),
    [
        pytest.param(memory(np.linspace(40, 60, 1600)), MEMORY, id="gpu_memory_increase"),
        pytest.param(clocks(np.ones(200)), HEAT, id="gpu_thermal_throttle"),
        pytest.param(errors(retired_pages=np.repeat([4.0, 5.0], 60)), ERRORS, id="hardware"),
    ],
)
def test_restarts_change_nothing(made: RunBuilder, specs: tuple[RuleSpec, ...]) -> None:
    plain = [issue.issue_id for issue in issues_of(made.records, specs=specs)]
    assert plain
    assert [issue.issue_id for issue in issues_of(made.records, specs=restarted(specs))] == plain


# -- from NVML to the rules


def trace(
    gpus: list[FakeGpu], readings: int, before: Callable[[int], None], log: Path
) -> Iterator[Line]:
    """What the sampler reads of made devices, one reading each half second."""
    sampler = Gpus(report=lambda text: None)
    xids = XidSamples(lambda: sampler.places, log)
    for n in range(readings):
        before(n)
        found = sampler.read(0.5 * n)
        yield 0.5 * n, {**found, **xids.read(0.5 * n)}
    sampler.close()
    xids.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The root of a machine with a kernel log."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kmsg").touch()
    return tmp_path


def replayed(lines: Iterator[Line], path: Path) -> RunBuilder:
    """The trace, through a file."""
    write(path, lines)
    made = run({"cpu.percent": [10.0]})
    add_trace(made, read(path))
    return made


def test_a_gpu_that_gets_hot_breaks_and_falls_off(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    gpus = [FakeGpu(), FakeGpu(place="00000000:65:00.0")]
    fake_nvml.install(monkeypatch, gpus)

    def before(n: int) -> None:
        sick = gpus[1]
        if n == 100:
            sick.throttled, sick.celsius, sick.sm_mhz = THERMAL | 0x04, 91, 1000
        if n == 300:
            sick.uncorrected = 1
        if n == 330:
            with (log / "dev" / "kmsg").open("a") as file:
                file.write("4,1,1,-;NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.\n")
            sick.fails["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST

    made = replayed(trace(gpus, 400, before, log), log / "trace.jsonl")
    issues = issues_of(made.records, specs=SYSTEM)
    found = [(i.use, i.branch, i.severity, i.subject.name) for i in issues
             if i.state == "firing"]  # fmt: skip
    sick = "gpu 1 of node"
    assert found == [
        ("gpu_thermal_throttle", "thermal", "warning", sick),
        ("gpu_hardware_error", "ecc", "critical", sick),
        ("gpu_hardware_error", "xid", "critical", sick),
    ]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(pynvml.NVML_ERROR_NOT_SUPPORTED, id="not supported"),
        pytest.param(pynvml.NVML_ERROR_NO_PERMISSION, id="no permission"),
        pytest.param(pynvml.NVML_ERROR_UNKNOWN, id="unknown"),
        pytest.param(pynvml.NVML_ERROR_GPU_IS_LOST, id="lost"),
        pytest.param(pynvml.NVML_ERROR_RESET_REQUIRED, id="reset required"),
        pytest.param(pynvml.NVML_ERROR_TIMEOUT, id="timeout"),
    ],
)
def test_a_driver_that_refuses_is_no_issue(
    monkeypatch: pytest.MonkeyPatch, log: Path, code: int
) -> None:
    gpus = [FakeGpu()]
    fake_nvml.install(monkeypatch, gpus)

    def before(n: int) -> None:
        if n == 5 * RARELY:
            names = ("UtilizationRates", "TotalEccErrors", "RetiredPages", "RemappedRows",
                     "CurrentClocksThrottleReasons", "Temperature")  # fmt: skip
            gpus[0].fails = {f"nvmlDeviceGet{name}": code for name in names}

    assert_quiet(replayed(trace(gpus, 200, before, log), log / "trace.jsonl").records, specs=SYSTEM)


def test_a_healthy_gpu_is_quiet(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    gpus = [FakeGpu(corrected=3, retired=(1, 0)), FakeGpu(place="00000000:65:00.0")]
    fake_nvml.install(monkeypatch, gpus)

    def before(n: int) -> None:
        for i, device in enumerate(gpus):
            device.busy = 90 + (7 * n + i) % 11
            device.corrected += n % 97 == 0
            device.used = 40 * GIB + (n % 13) * (GIB >> 6)

    assert_quiet(
        replayed(trace(gpus, 1300, before, log), log / "trace.jsonl").records, specs=SYSTEM
    )


def test_this_machine_is_recorded_and_replayed(tmp_path: Path) -> None:
    """Its GPU, too, where it has one."""
    sampler = Gpus(report=lambda text: None)
    node = Node(folder=tmp_path, gpus=sampler)
    write(tmp_path / "trace.jsonl", recorded(node, seconds=0.2, every_s=0.04))
    node.close()
    node.machine.close()
    lines = read(tmp_path / "trace.jsonl")
    assert len(lines) >= 5
    made = run({"cpu.percent": [10.0]})
    add_trace(made, lines)
    assert_quiet(made.records, specs=SYSTEM)
