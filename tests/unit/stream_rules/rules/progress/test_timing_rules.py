"""`throughput_regression`, `step_outlier`, `max_initialization_time`, `checkpoint_stall`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from support.rules.restarts import told_with_restarts
from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointWritten
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import PhaseMark, RunStarted
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.signals.cpu_contention import CpuContention
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

SLOWER = only("throughput_regression")
OUTLIER = only("step_outlier")
START = only("max_initialization_time")
WRITES = only("checkpoint_stall")
Doubles = npt.NDArray[np.float64]


@dataclass
class Loop:
    """Step times of a noisy machine, in seconds, by part."""

    wait: Doubles
    compute: Doubles
    optimizer: Doubles
    rest: Doubles
    checkpoint: Doubles
    evaluation: Doubles

    def __len__(self) -> int:
        return len(self.wait)

    def run(
        self,
        *,
        first: int = 0,
        per_frame: int = 10,
        system: bool = False,
        node: Mapping[str, float] | None = None,
    ) -> RunBuilder:
        """As records; the node is sampled with `system`, its I/O wait high while `rest` is long, or
        it says `node` all the time."""
        run = RunBuilder()
        run.started()
        total = sum(
            (self.wait, self.compute, self.optimizer, self.rest, self.checkpoint, self.evaluation),
            start=np.zeros(len(self)),
        )
        for i in range(0, len(self), per_frame):
            at = slice(i, i + per_frame)
            run.step_ms = max(1, round(1000 * float(total[at].mean())))
            run.steps(
                range(first + i, first + i + len(total[at])),
                per_frame=per_frame if not system else 1,
                step_time_s=total[at],
                data_wait_s=self.wait[at],
                forward_s=self.compute[at] / 3,
                backward_s=2 * self.compute[at] / 3,
                optimizer_s=self.optimizer[at],
                checkpoint_s=self.checkpoint[at],
                evaluation_s=self.evaluation[at],
            )
            if system:
                high = float(self.rest[at].max()) > 0.05
                run.system({"cpu.iowait_percent": [60.0 if high else 1.0]})
            if node is not None:
                run.system({name: [value] for name, value in node.items()})
        return run


def loop(steps: int = 1000, *, seed: int = 0, noise: float = 0.15) -> Loop:
    """Ten milliseconds a step, with heavy-tailed noise that hangs together in time."""
    chance = np.random.default_rng(seed)
    drift = np.convolve(chance.standard_normal(steps + 200), np.ones(200) / 200**0.5, "valid")
    shape = np.exp(noise * (0.3 * drift[:steps] + chance.standard_normal(steps)))
    tail = 1 + (chance.random(steps) < 0.01) * chance.pareto(1.5, steps)
    base = 0.010 * shape * tail
    zero = np.zeros(steps)
    return Loop(0.1 * base, 0.6 * base, 0.2 * base, 0.1 * base, zero.copy(), zero.copy())


def told(run: RunBuilder, specs: Sequence[RuleSpec]) -> list[IssueFiring]:
    return [i for i in issues_of(run.records, specs=specs) if i.state != "ongoing"]


# -- throughput_regression


def test_slower_steps_of_a_loader_are_named_with_the_step_that_began_it() -> None:
    made = loop(2000)
    made.wait[800:] += 0.020
    issue = assert_fires(made.run().records, "throughput_regression", specs=SLOWER)
    assert (issue.severity, issue.branch, issue.stop_worthy) == ("info", "data", False)
    assert issue.first_step is not None
    assert 790 <= issue.first_step <= 820
    assert issue.step is not None
    assert issue.step <= 800 + 300
    assert "waiting for data" in issue.reason


@pytest.mark.parametrize(
    "specs",
    [
        only("throughput_regression", warmup_steps=4000),
        only("throughput_regression", block=1, warmup_steps=300),
        only("throughput_regression", for_steps=2500),
    ],
    ids=["warmup_steps", "block", "for_steps"],
)
def test_long_times_are_waited_for_and_no_longer(specs: tuple[RuleSpec, ...]) -> None:
    made = loop(8000)
    made.wait[5000:] += 0.020
    issue = assert_fires(made.run(per_frame=50).records, "throughput_regression", specs=specs)
    assert issue.first_step is not None
    assert 4990 <= issue.first_step <= 5020


@pytest.mark.parametrize(
    ("node", "told_of"),
    [
        ({"pressure.cpu_some_percent": 60.0}, 0),
        ({"pressure.cpu_some_percent": 2.0, "cpu.percent": 99.0}, 1),
        ({"cpu.percent": 98.0, "cpu.process_tree_percent": 100.0, "cpu.cores": 2.0}, 0),
        ({"cpu.percent": 98.0, "cpu.process_tree_percent": 195.0, "cpu.cores": 2.0}, 1),
        ({"cpu.percent": 50.0, "cpu.process_tree_percent": 10.0, "cpu.cores": 2.0}, 1),
    ],
)
def test_slower_steps_are_no_news_while_the_cores_are_crowded(
    node: dict[str, float], told_of: int
) -> None:
    made = loop(2000)
    made.wait[800:] += 0.020
    issues = issues_of(made.run(node=node).records, specs=SLOWER)
    assert len([i for i in issues if i.state == "firing"]) == told_of


def test_the_cores_that_count_are_those_of_the_lowest_rank() -> None:
    """Samples of another node came first."""

    def started(rank: int, node: str) -> RunStarted:
        return RunStarted(
            run_id="run-1", incarnation="i", rank=rank, world_size=2, job_id="job", node=node
        )

    def samples(node: str, pressure: float, count: int = 1) -> list[SystemFrame]:
        run = RunBuilder()
        for _ in range(count):
            run.system({"pressure.cpu_some_percent": [pressure]}, node=node)
        return [SystemFrame.decode(record.value or b"") for record in run.records]

    contention = CpuContention()
    contention.add(samples("b", 60.0)[0], 1)
    contention.add_start(started(1, "b"))
    assert contention.since(0)
    contention.add_start(started(0, "a"))
    assert not contention.since(0)
    contention.add(samples("b", 60.0)[0], 2)
    assert not contention.since(0)
    contention.add(samples("a", 60.0)[0], 3)
    contention.add_start(started(1, "b"))
    assert contention.since(0)
    again = load_state(CpuContention, dump_state(contention))
    for at, frame in enumerate(samples("a", 1.0, 1_300)):
        again.add(frame, at + 4)
    assert len(again.times_ms) == len(again.crowded) == 1_200
    assert not again.since(0)


def test_but_a_warning_does_not_wait() -> None:
    made = loop(3000)
    for part in (made.wait, made.compute, made.optimizer, made.rest):
        part[500:] *= 60
    issues = issues_of(made.run(node={"pressure.cpu_some_percent": 60.0}).records, specs=SLOWER)
    assert issues[0].severity == "warning"


def test_a_throttled_machine_is_all_parts_and_in_time_a_warning() -> None:
    made = loop(3000)
    for part in (made.wait, made.compute, made.optimizer, made.rest):
        part[500:] *= 60
    issues = issues_of(made.run().records, specs=SLOWER)
    assert (issues[0].branch, issues[0].severity) == ("all_parts", "info")
    assert any(i.severity == "warning" for i in issues)


def test_a_larger_batch_never_warns_and_becomes_the_usual() -> None:
    made = loop(6000)
    made.compute[500:] *= 300
    issues = told(made.run(), SLOWER)
    assert [(i.state, i.severity, i.branch) for i in issues] == [
        ("firing", "info", "compute"),
        ("resolved", "info", "compute"),
    ]


def test_it_is_over_when_steps_are_quick_again() -> None:
    made = loop(3000)
    made.rest[800:1600] += 0.03
    issues = told(made.run(), SLOWER)
    assert [(i.state, i.branch) for i in issues] == [("firing", "rest"), ("resolved", "rest")]
    assert issues[1].step is not None
    assert issues[1].step < 1800


def healthy_loops() -> list[tuple[str, Loop]]:
    evaluates, saves, begins, short, quick = loop(), loop(), loop(), loop(60), loop(3000)
    evaluates.evaluation[::50] += 5.0
    saves.checkpoint[::100] += 0.5
    begins.compute[:8] += 30.0
    short.wait[30:] += 10.0
    quick.compute[1000:] /= 2  # a smaller batch, and a curriculum's next stage
    shared = loop(5000, noise=0.3)
    return [
        ("noise", loop(5000, seed=2)),
        ("a shared machine", shared),
        ("evaluations", evaluates),
        ("checkpoints", saves),
        ("compilation", begins),
        ("sixty steps", short),
        ("faster", quick),
    ]


@pytest.mark.parametrize(("name", "made"), healthy_loops(), ids=lambda v: v if v is str else "")
def test_timings_of_healthy_runs_are_left_alone(name: str, made: Loop) -> None:
    run = made.run(first=5000 if name == "noise" else 0)
    assert issues_of(run.records, specs=(*SLOWER, *OUTLIER)) == []


def test_no_numbers_are_no_slow_steps() -> None:
    run = RunBuilder()
    run.steps(range(500), step_time_s=float("nan"), per_frame=10)
    run.steps(range(500, 1000), step_time_s=0.0, per_frame=10)
    run.steps(range(1000, 1500), step_time_s=-1.0, per_frame=10)
    run.steps(range(1500, 2000), loss=1.0, per_frame=10)
    assert issues_of(run.records, specs=(*SLOWER, *OUTLIER)) == []


# -- step_outlier


def with_outliers(part: str, *, every: int | None = None, seconds: float = 0.2) -> Loop:
    made = loop(1000, noise=0.05)
    chance = np.random.default_rng(5)
    at = np.arange(0, 1000, every) if every else np.flatnonzero(chance.random(1000) < 0.04)
    getattr(made, part)[at] += seconds
    return made


@pytest.mark.parametrize(
    ("made", "branch"),
    [
        (with_outliers("wait"), "data_loading"),
        (with_outliers("checkpoint"), "checkpoint"),
        (with_outliers("rest", every=25), "the_loop"),
        (with_outliers("rest"), "unexplained"),
    ],
    ids=["data", "checkpoint", "loop", "unknown"],
)
def test_slow_steps_and_what_they_have_in_common(made: Loop, branch: str) -> None:
    issue = assert_fires(made.run().records, "step_outlier", specs=OUTLIER)
    assert (issue.severity, issue.branch) == ("info", branch)
    assert issue.evidence.series is not None


def test_the_node_waited_for_its_disk_in_those_moments() -> None:
    issues = issues_of(with_outliers("rest").run(per_frame=1, system=True).records, specs=OUTLIER)
    assert "io_wait" in {issue.branch for issue in issues}
    assert "waited for its disks" in issues[-1].reason


def test_few_or_cheap_outliers_are_none() -> None:
    few = loop(1000, noise=0.05)
    few.rest[100:1000:100] += 1.0
    cheap = with_outliers("rest", seconds=0.03)
    for made in (few, cheap):
        assert issues_of(made.run().records, specs=OUTLIER) == []


def test_it_is_over_when_the_window_has_passed() -> None:
    made = loop(3000, noise=0.05)
    made.wait[200:700:10] += 0.2
    assert [i.state for i in told(made.run(), OUTLIER)] == ["firing", "resolved"]


def test_a_restart_changes_nothing() -> None:
    made = loop(1500, noise=0.05)
    made.wait[200:500:10] += 0.2
    made.optimizer[600:900] += 0.03
    records = made.run().records
    for specs, expected in ((SLOWER, 2), (OUTLIER, 1)):
        told = [one.issue.model_dump_json() for one in replay(records, specs)]
        assert len([line for line in told if '"ongoing"' not in line]) >= expected
        assert told_with_restarts(records, specs, every=7) == told


# -- max_initialization_time


def test_a_job_without_a_first_step_is_said_and_the_step_ends_it() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    for _ in range(200):
        run.wait(10)
        run.heartbeat(role="launcher")
    run.steps([0], loss=1.0)
    issues = issues_of(run.records, specs=START)
    assert [(i.state, i.severity) for i in issues] == [("firing", "info"), ("resolved", "info")]
    assert "no rank has reported" in issues[0].evidence.explanation
    assert issues[0].at_ms - issues[0].onset_ms == 20 * 60_000


def test_a_rank_that_reports_and_makes_no_step_is_a_warning() -> None:
    run = RunBuilder()
    run.started()
    for _ in range(200):
        run.wait(10)
        run.heartbeat()
    assert assert_fires(run.records, START[0].name, specs=START).severity == "warning"


def test_a_job_at_its_work_is_not_initialising() -> None:
    for kind in ("steps", "evaluation", "forward", "ended"):
        run = RunBuilder()
        run.started()
        run.wait(60)
        if kind == "steps":
            run.steps([7_000_000], loss=1.0)
        elif kind == "evaluation":
            run.steps([0], mode="eval", loss=1.0)
        elif kind == "forward":
            run.heartbeat(forward_calls=3)
        else:
            run.ended()
        for _ in range(3):
            run.wait(1000)
            run.heartbeat(forward_calls=3 * (kind == "forward"))
        assert issues_of(run.records, specs=START, until_ms=run.now_ms) == [], kind


# -- checkpoint_stall


def written(run: RunBuilder, step: int, seconds: float, size: int = 10**9) -> None:
    run.event(
        CheckpointWritten(
            run_id=run.run_id,
            incarnation=run.incarnation,
            checkpoint=Checkpoint(path=f"s{step}.pt", step=step, size_bytes=size),
            duration_s=seconds,
        )
    )


def writing(seconds: Sequence[float], sizes: Sequence[int] | None = None) -> RunBuilder:
    run = RunBuilder()
    run.started()
    for i, lasted in enumerate(seconds):
        run.steps(range(100 * i, 100 * i + 100), loss=1.0, per_frame=100)
        written(run, 100 * i + 99, lasted, sizes[i] if sizes else 10**9)
    return run


def test_a_write_that_hangs_is_said_while_it_does() -> None:
    run = RunBuilder(world_size=2)
    for rank in (0, 1):
        run.started(rank=rank)
    run.steps(range(100), loss=1.0, per_frame=100)
    run.phase("checkpoint", "begin", rank=1)
    for _ in range(70):
        run.wait(10)
        run.heartbeat(rank=1, busy="checkpoint")
    run.phase("checkpoint", "end", rank=1)
    issues = issues_of(run.records, specs=WRITES)
    assert [(i.state, i.branch, i.first_rank) for i in issues] == [
        ("firing", "long", 1),
        ("resolved", "long", 1),
    ]
    assert issues[0].at_ms - issues[0].onset_ms == 600_000


def test_the_launchers_heartbeat_ends_no_write_of_rank_0() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    run.phase("checkpoint", "begin")
    for _ in range(70):
        run.wait(10)
        run.heartbeat(role="launcher")
        run.heartbeat(busy="checkpoint")
    issues = issues_of(run.records, specs=WRITES)
    assert [(i.state, i.branch, i.first_rank) for i in issues] == [("firing", "long", 0)]
    assert issues[0].at_ms - issues[0].onset_ms == 600_000


def test_a_threshold_with_a_part_of_a_millisecond() -> None:
    run = RunBuilder()
    run.started()
    run.phase("checkpoint", "begin")
    for _ in range(5):
        run.wait(1)
        run.heartbeat(busy="checkpoint")
    specs = only("checkpoint_stall", threshold="1000.5ms")
    found = issues_of(run.records, specs=specs)
    assert [(i.rule, i.state) for i in found] == [("checkpoint_stall", "firing")]


def test_a_write_without_marks_is_said_once_it_is_over() -> None:
    issues = issues_of(writing([1.0, 900.0, 1.0]).records, specs=WRITES)
    assert [(i.state, i.branch) for i in issues] == [("firing", "long"), ("resolved", "long")]


def test_a_marked_write_is_reported_once() -> None:
    run = RunBuilder()
    run.started()

    def mark(edge: Literal["begin", "end"], step: int) -> None:
        run.event(
            PhaseMark(
                run_id=run.run_id,
                incarnation=run.incarnation,
                name="checkpoint",
                edge=edge,
                step=step,
            )
        )

    for step in (99, 199):
        run.steps(range(step - 99, step + 1), loss=1.0, per_frame=100)
        mark("begin", step)
        for _ in range(70):
            run.wait(10)
            run.heartbeat(busy="checkpoint")
        mark("end", step)
        # The file is reported after the next step.
        run.steps([step + 1], loss=1.0)
        written(run, step, 700.0)
    records = run.records
    states = [one.state for one in issues_of(records, specs=WRITES)]
    assert states == ["firing", "resolved"] * 2
    told = [one.issue.model_dump_json() for one in replay(records, WRITES)]
    assert told_with_restarts(records, WRITES, every=3) == told

    # That of another step, without marks, was not reported.
    written(run, 299, 700.0)
    assert [one.state for one in issues_of(run.records, specs=WRITES)][4:5] == ["firing"]


def test_a_lost_end_mark_is_no_stall() -> None:
    run = RunBuilder()
    run.started()
    run.phase("checkpoint", "begin")
    run.wait(5)
    run.heartbeat()
    run.wait(3600)
    run.heartbeat()
    assert issues_of(run.records, specs=WRITES) == []


def test_writes_that_take_longer_and_longer() -> None:
    seconds = [10.0 + 0.5 * (i % 3) for i in range(8)] + [25.0, 30.0, 40.0, 80.0, 90.0, 10.0, 10.0]
    issues = issues_of(writing(seconds).records, specs=WRITES)
    assert [(i.state, i.severity, i.branch) for i in issues] == [
        ("firing", "info", "growing"),
        ("ongoing", "warning", "growing"),
        ("resolved", "warning", "growing"),
    ]
    assert issues[0].first_step == 899
    records = writing(seconds).records
    told = [one.issue.model_dump_json() for one in replay(records, WRITES)]
    assert told_with_restarts(records, WRITES, every=3) == told


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ([10.0] * 8 + [30.0] * 5, [10**9] * 8 + [3 * 10**9] * 5),
        ([0.5] * 8 + [5.0] * 5, None),
        ([10.0] * 3 + [30.0] * 5, None),
        ([10.0, 30.0] * 10, None),
        ([0.0] * 20, None),
    ],
    ids=["larger files", "some seconds", "few", "by turns", "no time"],
)
def test_writes_that_are_well(seconds: list[float], sizes: list[int] | None) -> None:
    assert_quiet(writing(seconds, sizes).records, specs=WRITES)
