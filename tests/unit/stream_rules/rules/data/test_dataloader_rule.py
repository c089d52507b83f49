"""`dataloader`: made steps, and a real loader that sleeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.runs.recorded import recorded
from support.records.node_samples import restarted, sagemaker
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import DataLoaderSeen
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

RULE = only("dataloader")
Numbers = float | npt.NDArray[np.float64]


def run(
    wait_s: Numbers,
    step_s: Numbers = 0.1,
    *,
    steps: int = 120,
    device_s: float | None = None,
    **loader: Any,
) -> RunBuilder:
    """Steps of a training; `device_s` of which the GPU was timed at each tenth."""
    made = RunBuilder()
    made.started()
    if loader:
        loader = {"mode": "train", "batch_size": 64, "cores": 8, "workers": 0, **loader}
        made.event(DataLoaderSeen(run_id=made.run_id, incarnation=made.incarnation, **loader))
    waits = np.broadcast_to(np.asarray(wait_s, float), (steps,))
    times = np.broadcast_to(np.asarray(step_s, float), (steps,))
    for step in range(0, steps, 10):
        part = slice(step, step + 10)
        made.steps(
            range(step, min(steps, step + 10)),
            per_frame=10,
            columns={"data_wait_s": waits[part], "step_time_s": times[part]},
        )
        if device_s is not None:
            names = ("forward_device_s", "backward_device_s", "optimizer_device_s")
            made.steps([step], columns={name: device_s / 3 for name in names})
    return made


def told(made: RunBuilder, specs: tuple[RuleSpec, ...] = RULE) -> list[tuple[str, str, str]]:
    issues = issues_of(made.records, specs=specs)
    return [(i.branch, i.severity, i.state) for i in issues if i.state != "ongoing"]


def firing(made: RunBuilder) -> IssueFiring:
    return assert_fires(made.records, "dataloader", specs=RULE)


# -- starvation


def test_most_of_the_time_is_waited_for_a_batch() -> None:
    issue = firing(run(0.06, workers=0))
    assert (issue.branch, issue.severity, issue.stop_worthy) == ("starvation", "warning", False)
    assert issue.reason.startswith("60 % of the step time is spent waiting for the next batch: 60")
    assert "more workers than 0 (there are 8 cores)" in issue.remedy
    assert issue.step is not None
    assert issue.step < 30


def test_a_gpu_that_waits_for_a_fifth_of_the_time() -> None:
    issue = firing(run(0.03, device_s=0.06, workers=8, gpu=True, pin_memory=True))
    assert (issue.branch, issue.severity) == ("starvation", "warning")


def test_a_gpu_that_has_work_meanwhile_does_not_wait() -> None:
    assert told(run(0.06, device_s=0.098, workers=8, gpu=True, pin_memory=True)) == []


def test_workers_that_deliver_in_rounds_starve_it_as_well() -> None:
    rounds = np.where(np.arange(120) % 8 == 7, 0.8, 0.0)
    issue = firing(run(rounds, 0.04 + rounds, workers=8))
    assert (issue.branch, issue.severity) == ("starvation", "warning")


def test_it_is_over_when_batches_come_in_time() -> None:
    wait = np.repeat([0.06, 0.001], 60)
    states = [state for branch, _, state in told(run(wait)) if branch == "starvation"]
    assert states == ["firing", "resolved"]


def test_a_quick_model_on_a_cpu_is_told_at_most_an_advice() -> None:
    assert told(run(0.004, 0.006)) == []
    assert told(run(0.006, 0.02, workers=8)) == [("starvation", "info", "firing")]
    # 1,024 samples of a tensor in memory take a while.
    assert told(run(0.016, 0.03, workers=8, batch_size=1024)) == [("starvation", "info", "firing")]
    assert told(run(0.025, 0.03, workers=8, batch_size=1024)) == [("starvation", "info", "firing")]
    assert told(run(0.02, 0.03)) == [("starvation", "info", "firing")]
    in_memory = run(0.04, 0.045, workers=8, dataset="TensorDataset")
    assert told(in_memory) == [("starvation", "info", "firing")]


@pytest.mark.parametrize(
    ("wait", "step"),
    [
        pytest.param(0.01, 0.1, id="a tenth"),
        pytest.param(np.where(np.arange(120) % 10 == 0, 0.5, 0.0), 0.1, id="each epoch's first"),
        pytest.param(np.where(np.arange(120) < 3, 5.0, 0.001), 0.1, id="the first batches"),
        pytest.param(0.0, 0.1, id="never"),
        pytest.param(math.nan, 0.1, id="all NaN"),
        pytest.param(0.06, math.nan, id="no step time"),
        pytest.param(0.06, 0.0, id="no time at all"),
    ],
)
def test_loaders_that_are_quick_enough(wait: Numbers, step: Numbers) -> None:
    assert told(run(wait, step)) == []
    assert told(run(wait, step, workers=4)) == []


def test_a_short_run_is_left_alone() -> None:
    assert told(run(0.09, steps=20)) == []


# -- workers and pinned memory


def test_too_many_workers_are_an_advice_at_once() -> None:
    assert told(run(0.0, workers=24)) == [("workers", "info", "firing")]
    assert told(run(0.0, workers=16)) == []


def test_few_workers_are_a_finding_in_the_reference_only() -> None:
    assert told(run(0.0, workers=1)) == []
    assert told(run(0.0, workers=1), sagemaker("Dataloader")) == [("workers", "info", "firing")]


def ranks(count: int, *, node_cores: float | None, **loader: Any) -> RunBuilder:
    """Ranks of one node with so many cores, of which rank 0 may use eight."""
    made = RunBuilder(world_size=count)
    for rank in range(count):
        made.started(rank=rank, node="node")
    if node_cores is not None:
        made.system({"cpu.cores": node_cores})
    made.records += run(loader.pop("wait_s", 0.0), **loader).records[1:]
    return made


def test_the_workers_of_all_ranks_count_where_they_share_the_cores_of_the_node() -> None:
    assert told(ranks(1, node_cores=8.0, workers=9)) == []
    assert told(ranks(2, node_cores=8.0, workers=9)) == [("workers", "info", "firing")]


@pytest.mark.parametrize("node_cores", [16.0, None], ids=["bound", "not known"])
def test_ranks_that_are_bound_to_cores_of_their_own_have_their_own_workers(
    node_cores: float | None,
) -> None:
    assert told(ranks(2, node_cores=node_cores, workers=9)) == []
    (issue,) = [
        one
        for one in issues_of(ranks(2, node_cores=node_cores, workers=17).records, specs=RULE)
        if one.state == "firing"
    ]
    assert issue.reason.startswith("17 data-loader workers on 8 cores")


def test_a_bound_rank_is_asked_for_more_workers_by_its_own_cores() -> None:
    few = sagemaker("Dataloader")
    assert told(ranks(2, node_cores=16.0, workers=4), few) == [("workers", "info", "firing")]
    assert told(ranks(2, node_cores=None, workers=4), few) == []
    assert told(ranks(2, node_cores=8.0, workers=4), few) == []
    starving = ranks(2, node_cores=16.0, workers=4, wait_s=0.06)
    assert "more workers than 4 (there are 8 cores)" in firing(starving).remedy


def test_unpinned_memory_is_an_advice_where_the_model_is_on_a_gpu() -> None:
    made = run(0.0, device_s=0.09, workers=8, gpu=True)
    assert told(made) == [("pin_memory", "info", "firing")]
    assert told(run(0.0, device_s=0.09, workers=8, gpu=True, pin_memory=True)) == []
    assert told(run(0.0, workers=8, gpu=True)) == []


def test_an_evaluations_loader_is_of_no_interest() -> None:
    assert told(run(0.0, workers=24, mode="eval")) == []


# -- edges


@pytest.mark.parametrize("first", [0, 5000])
def test_restarts_repeats_and_a_lower_rank_change_little(first: int) -> None:
    made = run(0.06, workers=1)
    plain = [issue.issue_id for issue in issues_of(made.records, specs=RULE)]
    assert [issue.issue_id for issue in issues_of(made.records, specs=restarted(RULE))] == plain
    made.again(made.records[4])
    made.steps(range(200, 240), rank=3, data_wait_s=0.0, step_time_s=0.1)
    assert [issue.issue_id for issue in issues_of(made.records, specs=RULE)] == plain
    resumed = RunBuilder()
    resumed.steps(range(first, first + 40), data_wait_s=0.08, step_time_s=0.1)
    assert firing(resumed).first_step == first + 3


# -- real training


def test_a_loader_that_really_sleeps() -> None:
    records = recorded("mlp", "slow_data_loader")
    issue = assert_fires(records, "dataloader", specs=RULE)
    assert (issue.branch, issue.severity) == ("starvation", "warning")


def test_the_same_training_with_a_quick_loader() -> None:
    assert issues_of(recorded("mlp"), specs=RULE) == []
