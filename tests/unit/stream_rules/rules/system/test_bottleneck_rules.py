"""`cpu_bottleneck`, `io_bottleneck`, `batch_size`, `load_balancing` on made samples."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
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
from tocsin.bus.port import Record
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.runs import DataLoaderSeen
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.rules.system.load_balancing import distances, histogram
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

CPU = only("cpu_bottleneck")
IO = only("io_bottleneck")
BATCH = only("batch_size")
BALANCE = only("load_balancing")
N = 1100
BUSY_CORE = "cpu.process_tree_busiest_core_percent"


def run(columns: Columns, *, steps: bool = True, node: str = "node") -> RunBuilder:
    return run_of(columns, steps=steps, node=node, frame=50)


def rng(low: float, high: float, samples: int = N, seed: int = 0) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).uniform(low, high, samples)


# -- cpu_bottleneck


def waits(core: Samples | float = 98.0, percent: Samples | float = 3.0) -> Columns:
    cpu = core if not isinstance(core, float) else np.full(N, core)
    return {**gpu(percent), BUSY_CORE: cpu, "cpu.percent": 12.0}


def test_gpus_that_wait_for_a_core() -> None:
    issue = assert_fires(run(waits()).records, "cpu_bottleneck", specs=CPU)
    assert (issue.severity, issue.stop_worthy, issue.subject.name) == ("warning", False, "node")
    assert "a core that the job needs for 98 %" in issue.reason


def test_the_phase_is_named_in_which_the_time_goes() -> None:
    made = run_of({name: np.asarray(c)[:50] if np.ndim(c) else c for name, c in waits().items()})
    made.step_ms = 0
    for first in range(1, 200, 10):
        times = {"data_wait_s": 0.4, "forward_s": 0.05, "backward_s": 0.05}
        made.steps(range(first, first + 10), columns=times)
        part = {name: np.full(50, np.max(column)) for name, column in waits().items()}
        add_samples(made, part, frame=50)
    issue = assert_fires(made.records, "cpu_bottleneck", specs=CPU)
    assert issue.reason.endswith("80 % of the steps' time is data loading")
    facts = {fact.name: fact.value for fact in issue.evidence.facts}
    assert facts["time in data loading"] == pytest.approx(80)
    assert facts["time in the forward pass"] == pytest.approx(10)


def test_the_cores_that_a_job_may_use_count() -> None:
    tree: Columns = {"cpu.process_tree_percent": np.full(N, 195.0), "cpu.limit_cores": 2.0}
    assert_fires(run({**gpu(3.0), **tree}).records, "cpu_bottleneck", specs=CPU)
    assert_quiet(run({**gpu(3.0), **tree, "cpu.limit_cores": 8.0}).records, specs=CPU)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(waits(percent=60.0), id="the GPU works"),
        pytest.param(waits(core=40.0), id="nothing is busy"),
        pytest.param(waits(core=np.where(np.arange(N) % 10 < 4, 99.0, 20.0)), id="now and then"),
        pytest.param({BUSY_CORE: np.full(N, 99.0), "cpu.percent": 99.0}, id="no GPU"),
        pytest.param({**waits(), **gpu(3.0, of_job=0.0)}, id="a GPU of somebody else"),
        pytest.param({**waits(), **gpu(3.0, memory_percent=1.0)}, id="no process on it"),
        pytest.param(
            {**waits(), **gpu(95.0, number=1), **gpu(95.0, number=2)}, id="one of three waits"
        ),
        pytest.param(waits(core=np.full(900, 99.0)), id="a short run"),
        pytest.param(waits(core=np.full(N, math.nan)), id="all NaN"),
    ],
)
def test_nodes_without_a_bottleneck(columns: Columns) -> None:
    assert told(run(columns), CPU) == []


def test_preparing_data_is_no_bottleneck() -> None:
    assert told(run(waits(), steps=False), CPU) == []


def test_it_is_resolved_when_the_gpu_works() -> None:
    core = np.full(2 * N, 98.0)
    percent = np.concatenate([np.full(N, 3.0), np.full(N, 90.0)])
    assert told(run(waits(core, percent)), CPU) == [("warning", "firing"), ("warning", "resolved")]


# -- io_bottleneck


def test_gpus_that_wait_for_a_disk() -> None:
    io: Columns = {"cpu.iowait_percent": np.full(N, 1.5), "pressure.io_some_percent": 88.0}
    issue = assert_fires(run({**gpu(5.0), **io}).records, "io_bottleneck", specs=IO)
    assert "waited for input and output for 88 %" in issue.reason
    share: Columns = {"cpu.iowait_percent": np.full(N, 70.0)}
    assert_fires(run({**gpu(5.0), **share}).records, "io_bottleneck", specs=IO)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({**gpu(80.0), "pressure.io_some_percent": np.full(N, 90.0)}, id="GPU works"),
        pytest.param({**gpu(5.0), "pressure.io_some_percent": rng(0, 60)}, id="some"),
        pytest.param({**gpu(5.0), "cpu.iowait_percent": np.full(N, math.nan)}, id="all NaN"),
        pytest.param({"cpu.iowait_percent": np.full(N, 90.0)}, id="no GPU"),
    ],
)
def test_disks_that_nobody_waits_for(columns: Columns) -> None:
    assert told(run(columns), IO) == []


def test_the_preset_has_the_documented_threshold_of_the_reference() -> None:
    columns = {**gpu(60.0), "cpu.iowait_percent": np.full(N, 80.0)}
    assert told(run(columns), IO) == []
    assert told(run(columns), sagemaker("IOBottleneck")) == [("warning", "firing")]


# -- batch_size


def room(
    percent: Samples | float = 40.0, memory: Samples | float = 30.0, cpu: float = 20.0
) -> Columns:
    return {**gpu(percent, memory_percent=memory), "cpu.percent": np.full(N, cpu)}


def test_room_for_a_larger_batch_is_an_advice() -> None:
    made = RunBuilder()
    made.started()
    made.steps([0], loss=1.0)
    made.event(
        DataLoaderSeen(
            run_id=made.run_id,
            incarnation=made.incarnation,
            mode="train",
            workers=2,
            batch_size=64,
        )
    )
    add_samples(made, room(), frame=50)
    issue = assert_fires(made.records, "batch_size", specs=BATCH)
    assert issue.severity == "info"
    assert "at least a batch of 192 would fit" in issue.reason
    assert "3.0 times the batch" in issues_of(run(room()).records, specs=BATCH)[0].reason


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(room(percent=85.0), id="the GPU is busy"),
        pytest.param(room(memory=85.0), id="its memory is in use"),
        pytest.param(room(cpu=90.0), id="the processors are busy"),
        pytest.param(room(percent=0.0), id="it does nothing"),
        pytest.param(room(memory=1.0), id="no process on it"),
        pytest.param({"cpu.percent": np.full(N, 5.0)}, id="no GPU"),
        pytest.param(room(percent=np.full(N, math.nan)), id="all NaN"),
        pytest.param(room(percent=np.where(np.arange(N) % 10 == 0, 99.0, 5.0)), id="in peaks"),
    ],
)
def test_batches_that_are_large_enough(columns: Columns) -> None:
    assert told(run(columns), BATCH) == []


# -- load_balancing


def two(first: Samples | float, second: Samples | float) -> Columns:
    table = [np.broadcast_to(np.asarray(x, float), (N,)) for x in (first, second)]
    return {**gpu(table[0], of_job=1.0), **gpu(table[1], number=1, of_job=1.0)}


def test_one_of_two_gpus_waits() -> None:
    issue = assert_fires(
        run(two(rng(85, 101), rng(0, 20))).records, "load_balancing", specs=BALANCE
    )
    assert issue.subject.name == "gpu 1 of node"
    assert issue.severity == "warning"


def test_gpus_of_two_nodes_are_compared() -> None:
    firing = [issue for issue in issues_of(_spread(), specs=BALANCE) if issue.state == "firing"]
    assert [issue.subject.name for issue in firing] == ["gpu 0 of b"]
    assert firing[0].evidence.also == ("gpu 0 of c",)


def _spread() -> list[Record]:
    """Three nodes, whose samples come in turns."""
    made = run_of({"gpu.0.utilization_percent": [50.0]}, node="d")
    for at in range(0, N, 50):
        for node, low in (("a", 90.0), ("b", 20.0), ("c", 21.0)):
            part = rng(low, low + 9, 50, seed=at)
            made.now_ms -= 0 if node == "a" else 25_000
            add_samples(made, gpu(part, of_job=1.0), node=node, frame=50)
    return made.records


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(two(rng(85, 101, seed=1), rng(85, 101)), id="both busy"),
        pytest.param(two(99.0, 95.0), id="nothing in common, and well balanced"),
        pytest.param(two(rng(0, 101, seed=1), rng(0, 101)), id="both up and down"),
        pytest.param(two(math.nan, 90.0), id="all NaN"),
        pytest.param(gpu(np.full(N, 3.0), of_job=1.0), id="one GPU"),
        pytest.param(
            {**gpu(np.full(N, 95.0)), **gpu(np.full(N, 3.0), number=1)}, id="nobody knows whose"
        ),
        pytest.param(
            {**two(95.0, 95.0), **gpu(np.zeros(N), number=1, of_job=0.0)}, id="not the job's"
        ),
    ],
)
def test_loads_that_are_balanced(columns: Columns) -> None:
    assert told(run(columns), BALANCE) == []


def test_it_fires_under_the_defaults_of_the_reference() -> None:
    # There a GPU at 100 % had an empty histogram, and each was compared with itself.
    assert told(run(two(100.0, 5.0)), sagemaker("LoadBalancing")) == [("warning", "firing")]


def test_distances_are_symmetric_and_bounded() -> None:
    shares = np.stack([histogram(v) for v in (rng(0, 101), np.full(N, 100.0), np.zeros(N))])
    found = distances(shares)
    assert np.allclose(found, found.T)
    assert np.allclose(np.diag(found), 0)
    assert found[1, 2] == pytest.approx(math.sqrt(math.log(2)))
    assert np.allclose(shares.sum(1), 1)


@pytest.mark.parametrize(
    ("columns", "specs"),
    [
        pytest.param(waits(), CPU, id="cpu_bottleneck"),
        pytest.param({**gpu(5.0), "cpu.iowait_percent": np.full(N, 70.0)}, IO, id="io_bottleneck"),
        pytest.param(room(), BATCH, id="batch_size"),
        pytest.param(two(95.0, 10.0), BALANCE, id="load_balancing"),
    ],
)
def test_restarts_repeats_and_late_samples_change_nothing(
    columns: Columns, specs: tuple[RuleSpec, ...]
) -> None:
    plain = [issue.issue_id for issue in issues_of(run(columns).records, specs=specs)]
    assert len(plain) == 1
    assert [i.issue_id for i in issues_of(run(columns).records, specs=restarted(specs))] == plain
    odd = run(columns)
    odd.again(odd.records[4])
    odd.add(SystemFrame.decode(odd.records[5].value or b""), boot="another")
    assert [i.issue_id for i in issues_of(odd.records, specs=specs)] == plain
