"""`host_memory_increase`, `disk_full`, `low_gpu_utilization`: samples, made and real."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from support.records.node_samples import GIB, Samples, restarted, run_of, sagemaker, told
from tocsin.emitter.node.sampler import Node
from tocsin.schemas.records.frames import SystemFrame
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import (
    START_MS,
    RunBuilder,
    assert_fires,
    assert_quiet,
    issues_of,
    only,
)

MEMORY = only("host_memory_increase")
DISK = only("disk_full")
GPU = only("low_gpu_utilization")


# -- host_memory_increase


def memory(used: Samples, *, limit: float = 16 * GIB, steps: bool = True) -> RunBuilder:
    columns = {"memory.process_tree_bytes": used, "memory.limit_bytes": limit}
    return run_of({**columns, "memory.used_bytes": 1000 * GIB}, steps=steps)


def grows(start: float, end: float, samples: int = 1200) -> npt.NDArray[np.float64]:
    chance = np.random.default_rng(0)
    noise = 0.02 * GIB * chance.standard_normal(samples)
    return np.linspace(start * GIB, end * GIB, samples) + noise


def test_memory_that_will_meet_its_limit() -> None:
    issue = assert_fires(memory(grows(7, 12)).records, "host_memory_increase", specs=MEMORY)
    assert (issue.severity, issue.stop_worthy, issue.subject.name) == ("warning", False, "node")
    assert "of 16.0 GiB" in issue.reason
    assert issue.evidence.series is not None
    assert issue.evidence.series.x == "s"


def test_it_is_resolved_when_the_growth_has_ended() -> None:
    used = np.concatenate([grows(7, 12), np.full(6000, 12 * GIB)])
    assert told(memory(used), MEMORY) == [("warning", "firing"), ("warning", "resolved")]


HOURS_S = np.arange(2 * 7200) * 0.5


@pytest.mark.parametrize(
    "wave",
    [
        pytest.param(0.15 * np.sin(HOURS_S / 60), id="minutes"),
        pytest.param(0.3 * np.sin(HOURS_S / 200), id="epochs"),
        pytest.param(0.2 * np.random.default_rng(0).standard_normal(len(HOURS_S)), id="noise"),
    ],
)
def test_a_leak_with_ups_and_downs_is_one_issue(wave: npt.NDArray[np.float64]) -> None:
    used = (9 + 5 * HOURS_S / 7200 + wave) * GIB
    assert told(memory(used), MEMORY) == [("warning", "firing")]


def test_a_leak_that_begins_late_is_seen_within_minutes() -> None:
    used = np.concatenate([np.full(7200, 9 * GIB), grows(9, 15)])
    issue = assert_fires(memory(used).records, "host_memory_increase", specs=MEMORY)
    assert issue.onset_ms is not None
    assert 3600 < (issue.onset_ms - 1_800_000_000_000) / 1000 < 3600 + 400


@pytest.mark.parametrize(
    "used",
    [
        pytest.param(np.full(2000, 15.5 * GIB), id="full, and constant"),
        pytest.param(grows(1, 6), id="below half"),
        pytest.param(grows(9, 9.05, 3600), id="far from its limit"),
        pytest.param(grows(7, 15, 50), id="too few samples"),
        pytest.param(np.repeat([6 * GIB, 12 * GIB], 900), id="one jump"),
        pytest.param(np.full(500, math.nan), id="all NaN"),
        pytest.param(9 * GIB + 2 * GIB * np.sin(np.arange(4000) / 50), id="up and down"),
    ],
)
def test_memory_left_alone(used: npt.NDArray[np.float64]) -> None:
    assert_quiet(memory(used).records, specs=MEMORY)


def test_memory_that_will_be_full_in_a_minute() -> None:
    (issue, *_) = issues_of(memory(grows(1, 15.5, 240)).records, specs=MEMORY)
    assert (issue.branch, issue.severity) == ("fast", "warning")
    # Two minutes from nothing to all of it: known half a minute before.
    assert issue.at_ms - START_MS < 90_000


def test_growth_before_the_first_step_predicts_nothing() -> None:
    assert_quiet(memory(grows(4, 15), steps=False).records, specs=MEMORY)


def test_workers_that_share_pages_do_not_count_them_twice() -> None:
    columns: dict[str, Samples | float] = {"memory.process_tree_bytes": grows(7, 15)}
    run = run_of({**columns, "memory.total_bytes": 16 * GIB, "memory.used_bytes": 4 * GIB})
    assert_quiet(run.records, specs=MEMORY)


def test_a_real_process_that_keeps_what_it_makes(tmp_path: Path) -> None:
    """Its own resident memory, sampled; the limit stands where it is met within the hour."""

    def sampled(*, leak: bool) -> RunBuilder:
        node = Node(root_pid=os.getpid(), folder=tmp_path)
        kept: list[bytearray] = []
        frames: list[dict[str, float]] = []
        for i in range(150):
            if leak:
                kept.append(bytearray(os.urandom(1024) * 1024))
            frames.append(node.sample(float(i)))
        start = frames[0]["memory.process_tree_bytes"]
        used = [frame["memory.process_tree_bytes"] for frame in frames]
        return run_of(
            {"memory.process_tree_bytes": used, "memory.limit_bytes": start + 400e6}, every_s=3.0
        )

    assert_quiet(sampled(leak=False).records, specs=MEMORY)
    assert_fires(sampled(leak=True).records, "host_memory_increase", specs=MEMORY)


# -- disk_full


def disk(free: Samples, total: float = 500e9) -> RunBuilder:
    return run_of({"disk.free_bytes": free, "disk.total_bytes": total})


def test_a_disk_that_is_full_is_critical() -> None:
    issue = assert_fires(disk([1e9] * 20).records, "disk_full", specs=DISK)
    assert (issue.severity, issue.stop_worthy) == ("critical", False)
    assert "1.0 of 500 GB" in issue.reason


def test_one_that_will_be_full_is_a_warning_then_critical() -> None:
    fills = np.linspace(100e9, 0, 1800)
    both = [("warning", "firing"), ("critical", "firing")]
    assert told(disk(fills), DISK) == both
    # Nobody who was warned is told at the worst moment, nor in the next hour, that it is over.
    assert told(disk(np.concatenate([fills, np.zeros(7200)])), DISK) == both


def test_both_are_over_once_there_has_been_space_for_a_while() -> None:
    freed = np.concatenate([np.linspace(100e9, 0, 1800), np.full(6000, 100e9)])
    assert told(disk(freed), DISK)[2:] == [("critical", "resolved"), ("warning", "resolved")]
    (last,) = issues_of(disk(freed).records, specs=DISK)[-1:]
    assert last.at_ms - START_MS > (900 + 1200) * 1000


def test_a_disk_that_hovers_at_its_floor_is_one_issue() -> None:
    free = 9.99e9 + 0.05e9 * np.sin(HOURS_S / 30)
    assert told(disk(free), DISK) == [("critical", "firing")]
    short = np.where(np.arange(14_400) % 600 < 500, 9e9, 30e9)
    assert told(disk(short), DISK) == [("critical", "firing")]


def test_other_folders_are_watched_and_two_on_one_disk_are_one() -> None:
    other: dict[str, Samples | float] = {
        "disk./data.free_bytes": [1e9] * 20,
        "disk./data.total_bytes": 900e9,
    }
    same: dict[str, Samples | float] = {
        "disk./tmp.free_bytes": 200e9,
        "disk./tmp.total_bytes": 500e9,
    }
    run = run_of({"disk.free_bytes": [200e9] * 20, "disk.total_bytes": 500e9, **other, **same})
    issue = assert_fires(run.records, "disk_full", specs=DISK)
    assert (issue.subject.name, issue.branch) == ("/data of node", "full")
    both = run_of({"disk.free_bytes": [1e9] * 20, "disk.total_bytes": 500e9,
                   "disk./tmp.free_bytes": 1e9, "disk./tmp.total_bytes": 500e9})  # fmt: skip
    assert assert_fires(both.records, "disk_full", specs=DISK).subject.name == "node"


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(disk([50e9] * 500), id="constant"),
        pytest.param(disk([100e9] * 500, total=10e12), id="one percent of a large one"),
        pytest.param(disk([90e9] * 300 + [60e9] * 300), id="one checkpoint"),
        pytest.param(disk(np.linspace(400e9, 399e9, 2000)), id="far from full"),
        pytest.param(
            disk(np.where(np.arange(3000) % 300 > 150, 40e9, 60e9)), id="checkpoints rotate"
        ),
        pytest.param(disk([math.nan] * 100), id="all NaN"),
    ],
)
def test_disks_left_alone(run: RunBuilder) -> None:
    assert_quiet(run.records, specs=DISK)


def test_samples_that_come_twice_or_go_back_in_time_change_nothing() -> None:
    run = disk(np.linspace(60e9, 40e9, 900))
    frame = SystemFrame.decode(run.records[5].value or b"")
    run.add(frame, boot="another")
    run.again(run.records[-1])
    assert len(issues_of(run.records, specs=DISK)) == 1


# -- low_gpu_utilization


def gpu(
    percent: Samples, *, memory_share: float = 0.5, more: dict[str, Samples | float] | None = None
) -> RunBuilder:
    return run_of(
        {
            "gpu.0.utilization_percent": percent,
            "gpu.0.memory_used_bytes": memory_share * 80e9,
            "gpu.0.memory_total_bytes": 80e9,
            **(more or {}),
        }
    )


def test_a_gpu_of_somebody_else_is_not_judged() -> None:
    run = gpu([0.0] * 1500, more={"gpu.0.of_job": 0.0})
    assert_quiet(run.records, specs=GPU)
    told_late = gpu([0.0] * 1500, more={"gpu.0.of_job": [1.0] * 1400 + [0.0] * 100})
    assert told(told_late, GPU) == [("warning", "firing"), ("warning", "resolved")]


def busy(samples: int = 1500, low: int = 92) -> npt.NDArray[np.float64]:
    return np.random.default_rng(0).integers(low, 101, samples).astype(float)


def reason_of(run: RunBuilder) -> tuple[str, object]:
    issue = assert_fires(run.records, "low_gpu_utilization", specs=GPU)
    return issue.severity, issue.evidence.facts[0].value


def test_three_reasons_are_kept_apart() -> None:
    waits = np.where(np.arange(1500) % 10 < 4, 0.0, 98.0)
    assert reason_of(gpu([0.0] * 1500)) == ("warning", "unused")
    assert reason_of(gpu(busy(low=20) * 0.5)) == ("warning", "underused")
    assert reason_of(gpu(waits)) == ("info", "fluctuating")


def test_the_gpu_is_named() -> None:
    run = gpu(busy(), more={"gpu.3.utilization_percent": [10.0] * 1500})
    issue = assert_fires(run.records, "low_gpu_utilization", specs=GPU)
    assert (issue.subject.kind, issue.subject.name) == ("device", "gpu 3 of node")


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(gpu(busy()), id="busy"),
        pytest.param(gpu([0.0] * 900), id="a short run"),
        pytest.param(gpu([0.0] * 1500, memory_share=0.01), id="no process on it"),
        pytest.param(gpu(np.concatenate([np.zeros(900), busy(600)])), id="a slow start"),
        pytest.param(gpu([math.nan] * 1500), id="all NaN"),
    ],
)
def test_gpus_left_alone(run: RunBuilder) -> None:
    assert_quiet(run.records, specs=GPU)


def test_it_is_resolved_when_the_gpu_works() -> None:
    run = gpu(np.concatenate([np.zeros(1200), busy(1500)]))
    assert told(run, GPU) == [("warning", "firing"), ("warning", "resolved")]
    (gone,) = issues_of(run.records, specs=GPU)[-1:]
    assert gone.evidence.facts[0].value == "unused"
    # Over when a whole window was busy.
    assert gone.at_ms - START_MS >= (1200 + 500) * 500


@pytest.mark.parametrize(
    "percent",
    [
        pytest.param(lambda chance, n: np.clip(chance.normal(62, 5, n), 0, 100), id="normal"),
        pytest.param(lambda chance, n: chance.uniform(0, 73, n), id="uniform"),
    ],
)
def test_a_gpu_about_its_threshold_is_one_warning(
    percent: Callable[[np.random.Generator, int], npt.NDArray[np.float64]],
) -> None:
    warnings = [
        state
        for severity, state in told(gpu(percent(np.random.default_rng(0), 14_400)), GPU)
        if severity == "warning"
    ]
    assert warnings == ["firing"]


def test_a_gpu_that_falls_idle_is_one_warning() -> None:
    run = gpu(np.concatenate([busy(1500), np.zeros(1500)]))
    assert told(run, GPU) == [("info", "firing"), ("info", "resolved"), ("warning", "firing")]
    assert "not used at all" in issues_of(run.records, specs=GPU)[2].reason


def test_a_restart_begins_to_count_again() -> None:
    run = gpu([0.0] * 900)
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started()
    for _ in range(90):
        run.system({"gpu.0.utilization_percent": [0.0] * 10}, every_s=0.5)
    assert_quiet(run.records, specs=GPU)


@pytest.mark.parametrize(
    ("run", "specs"),
    [
        pytest.param(memory(grows(7, 12)), MEMORY, id="host_memory_increase"),
        pytest.param(disk(np.linspace(100e9, 0, 1800)), DISK, id="disk_full"),
        pytest.param(gpu([0.0] * 1500), GPU, id="low_gpu_utilization"),
    ],
)
def test_being_saved_behind_each_record_changes_nothing(
    run: RunBuilder, specs: tuple[RuleSpec, ...]
) -> None:
    plain = [issue.issue_id for issue in issues_of(run.records, specs=specs)]
    assert plain
    assert [issue.issue_id for issue in issues_of(run.records, specs=restarted(specs))] == plain


def test_presets_of_the_reference_give_the_same_verdict() -> None:
    waits = np.where(np.arange(1500) % 10 < 4, 0.0, 98.0)
    for percent in ([0.0] * 1500, waits, busy()):
        assert told(gpu(percent), sagemaker("LowGPUUtilization")) == told(gpu(percent), GPU)


# -- graphs that are kept


def graphs(*kept: float, rank: int = 0) -> RunBuilder:
    run = RunBuilder()
    run.started()
    for i, count in enumerate(kept, 1):
        run.steps([50 * i], rank=rank, graphs_kept=count)
    return run


def test_graphs_of_past_steps_that_are_kept_are_a_warning() -> None:
    specs = only("host_memory_increase")
    issue = assert_fires(graphs(5, 10, 15, 20, 20).records, "host_memory_increase", specs=specs)
    assert (issue.branch, issue.severity, issue.stop_worthy) == ("graphs", "warning", False)
    assert (issue.first_step, issue.step) == (0, 150)
    assert "total += loss" in issue.remedy


def test_graphs_that_go_again_are_over_and_a_few_are_left_alone() -> None:
    specs = only("host_memory_increase")
    states = [i.state for i in issues_of(graphs(10, 20, 20, 0).records, specs=specs)]
    assert states == ["firing", "resolved"]
    # A list that is emptied at the end of each epoch of a hundred steps, or a look in between.
    assert issues_of(graphs(5, 10, 0, 5, 9, 9, 9, 0, 12, 0).records, specs=specs) == []
