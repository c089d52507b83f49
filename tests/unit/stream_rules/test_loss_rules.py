"""`loss_diverged` and `loss_not_decreasing` on made series and on a real one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tocsin.schemas.observed import LossInputsSeen
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

DIVERGED = only("loss_diverged")
FLAT = only("loss_not_decreasing")
SHORT = only("loss_not_decreasing", num_steps=40)

Losses = npt.NDArray[np.float64] | list[float]


def run_of(
    losses: Losses, *, optimizers: int = 1, per_frame: int = 1, classes: int = 0
) -> RunBuilder:
    run = RunBuilder()
    run.started(optimizers=optimizers)
    if classes:
        seen(run, classes)
    run.steps(range(len(losses)), loss=losses, gradient_norm=1.0, per_frame=per_frame)
    return run


def real_losses() -> npt.NDArray[np.float64]:
    table = np.loadtxt(Path(__file__).parent / "data/nanogpt_losses.csv", delimiter=",", skiprows=4)
    return np.asarray(table[:, 1], np.float64)


def falling(steps: int = 200) -> list[float]:
    chance = np.random.default_rng(1)
    curve = 0.2 + 2.1 * np.exp(-np.arange(steps) / 40) + 0.05 * chance.standard_normal(steps)
    return [float(x) for x in curve]


# -- loss_diverged


def test_a_loss_ten_times_its_own_past_is_worth_a_stop() -> None:
    run = run_of([*falling(), *[30.0] * 60], classes=10)
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    told = [(i.state, i.severity, i.stop_worthy, i.first_step, i.step) for i in issues]
    assert told == [
        ("firing", "warning", False, 200, 209),
        ("ongoing", "critical", True, 200, 224),
    ]


def test_twice_its_past_is_a_warning() -> None:
    run = run_of([*falling(), *[2.5] * 60])
    issue = assert_fires(run.records, "loss_diverged", first_step=200, specs=DIVERGED)
    assert (issue.severity, issue.stop_worthy) == ("warning", False)


def test_one_issue_turns_critical_and_worth_a_stop() -> None:
    run = run_of([*falling(), *[2.5] * 60, *[30.0] * 60], classes=10)
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    told = [(issue.state, issue.severity, issue.stop_worthy) for issue in issues]
    assert told == [("firing", "warning", False), ("ongoing", "critical", True)]
    assert issues[1].turned_critical
    assert issues[0].issue_id == issues[1].issue_id


def test_a_severity_of_the_configuration_leaves_the_stop_to_ten_times() -> None:
    (spec,) = DIVERGED
    run = run_of([*falling(), *[2.5] * 60, *[30.0] * 60], classes=10)
    issues = issues_of(run.records, "loss_diverged", specs=[replace(spec, severity="critical")])
    told = [(issue.state, issue.severity, issue.stop_worthy) for issue in issues]
    assert told == [("firing", "critical", False), ("ongoing", "critical", True)]
    assert issues[1].turned_critical


def test_a_harder_task_stops_nothing() -> None:
    run = run_of([0.18, *[0.05 + 0.001 * (i % 7) for i in range(150)], *[0.5] * 150])
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    assert {(issue.severity, issue.stop_worthy) for issue in issues} == {("warning", False)}


@pytest.mark.parametrize(
    "losses",
    [
        [0.5, *np.linspace(0.5, 0.02, 300), *np.linspace(0.02, 8.0, 900)],
        [0.05, *[0.05] * 300, *[3.0] * 300],
    ],
    ids=["errors of Q-learning", "a value function at its first reward"],
)
def test_losses_that_grow_with_the_values_stop_nothing(losses: list[float]) -> None:
    issues = issues_of(run_of(losses).records, specs=DIVERGED)
    assert {(issue.severity, issue.stop_worthy) for issue in issues} == {("warning", False)}


def test_nor_does_a_resumed_run_whose_next_stage_is_no_worse_than_a_guess() -> None:
    run = run_of([*[0.03] * 300, *[0.6] * 300], classes=10)
    assert not any(issue.stop_worthy for issue in issues_of(run.records, specs=DIVERGED))


def test_a_hundred_times_needs_ten_steps_only() -> None:
    run = run_of([*falling(), *[300.0] * 10])
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    assert [(i.severity, i.stop_worthy, i.step) for i in issues] == [
        ("warning", False, 201),
        ("critical", True, 204),
    ]


def test_a_spike_of_three_steps_warns_and_never_stops() -> None:
    run = run_of([*falling(), *[300.0] * 3, *[0.2] * 200])
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    assert [(i.state, i.severity) for i in issues] == [
        ("firing", "warning"),
        ("resolved", "warning"),
    ]


def test_a_steep_rise_is_warned_of_before_it_has_lasted() -> None:
    issue = assert_fires(
        run_of([*falling(), *[6.0] * 30]).records,
        "loss_diverged",
        first_step=200,
        specs=DIVERGED,
    )
    assert (issue.severity, issue.step, issue.branch) == ("warning", 209, "risen")


def test_a_loss_without_a_lower_bound_is_said() -> None:
    losses = [-2.3 * 1.2**i for i in range(60)]
    issue = assert_fires(run_of(losses).records, "loss_diverged", specs=DIVERGED)
    assert (issue.branch, issue.severity, issue.stop_worthy) == ("falling", "warning", False)
    assert "sign" in issue.remedy


def seen(run: RunBuilder, classes: int, function: str = "cross_entropy") -> None:
    run.event(
        LossInputsSeen(
            run_id=run.run_id,
            incarnation=run.incarnation,
            function=function,
            step=1,
            rows=64,
            classes=classes,
            minimum=-1.0,
            maximum=1.0,
        )
    )


def test_a_cross_entropy_with_an_easy_beginning_has_not_diverged_below_a_guess() -> None:
    rising = [0.06, 0.07, 0.3, *(min(4.3, 0.5 * i) for i in range(1, 200))]
    for last, fires in ((rising, False), ([*rising, *[60.0] * 60], True)):
        run = RunBuilder()
        run.started()
        seen(run, 256)
        run.steps(range(len(last)), loss=last)
        assert bool(issues_of(run.records, specs=DIVERGED)) is fires


@pytest.mark.parametrize("late", [False, True])
def test_a_cross_entropy_with_the_wrong_sign_is_known_at_once(late: bool) -> None:
    run = RunBuilder()
    run.started()
    if not late:
        seen(run, 10)
    run.steps(range(10), loss=[-2.31 - 0.02 * i for i in range(10)])
    if late:
        seen(run, 10)
        run.steps(range(10, 20), loss=-2.6)
    issue = assert_fires(run.records, "loss_diverged", first_step=0, specs=DIVERGED)
    assert (issue.branch, issue.severity) == ("wrong_sign", "warning")
    assert issue.step == (9 if late else 2)


@pytest.mark.parametrize(
    ("losses", "classes", "optimizers"),
    [
        ([-97.7] * 20, 10, 1),
        ([-2.3, 0.4, -2.3] * 20, 10, 1),
        ([2.3] * 20, 10, 1),
        ([-2.3] * 20, 10, 2),
        ([-2.3] * 20, 0, 1),
    ],
    ids=["shifted", "signed", "right", "two optimizers", "no classes"],
)
def test_losses_that_have_their_sign(losses: list[float], classes: int, optimizers: int) -> None:
    run = RunBuilder()
    run.started(optimizers=optimizers)
    seen(run, classes, "cross_entropy" if classes else "mse_loss")
    run.steps(range(len(losses)), loss=losses)
    assert_quiet(run.records, specs=DIVERGED)


@pytest.mark.parametrize(
    ("losses", "optimizers"),
    [
        ([-2.3 * 1.2**i for i in range(60)], 2),
        ([2.0, 1.0, -3.0, *[-100.0] * 60], 1),
        ([0.0, *[-50.0] * 60], 1),
    ],
    ids=["a critic", "a likelihood", "from zero"],
)
def test_losses_that_are_negative_by_nature_may_fall(losses: list[float], optimizers: int) -> None:
    assert_quiet(run_of(losses, optimizers=optimizers).records, specs=DIVERGED)


def test_divergence_from_the_second_step_on_is_seen() -> None:
    run = run_of([2.3, *[4000.0] * 15])
    assert_fires(run.records, "loss_diverged", first_step=1, specs=DIVERGED)


@pytest.mark.parametrize("start", [0.0, 1e-9, -1e-8, 5e-4])
def test_a_loss_that_begins_near_zero_stops_nothing(start: float) -> None:
    run = run_of([*[start] * 30, *[0.02] * 170])
    assert not any(issue.stop_worthy for issue in issues_of(run.records, specs=DIVERGED))


def test_with_two_optimizers_it_only_warns() -> None:
    run = run_of([*falling(), *[400.0] * 60], optimizers=2)
    issue = assert_fires(run.records, "loss_diverged", specs=DIVERGED)
    assert (issue.severity, issue.stop_worthy) == ("warning", False)


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([*falling(), *[5.0] * 8, *[0.2] * 100], id="spike of eight steps"),
        pytest.param([2.3, 40.0, 72.0, 60.0, 20.0, 4.0, 2.0, *falling(300)], id="bad start"),
        pytest.param([-1.0 - 0.01 * i for i in range(300)], id="negative and falling"),
        pytest.param([0.0] * 200, id="all zero"),
        pytest.param(
            [float(x) for x in np.geomspace(2.3, 1e-6, 400)] + [1e-3] * 60, id="near zero"
        ),
        pytest.param([math.nan] * 200, id="all NaN"),
    ],
)
def test_healthy_losses_are_left_alone(losses: list[float]) -> None:
    assert_quiet(run_of(losses).records, specs=DIVERGED)


def test_it_resolves_when_the_loss_comes_back() -> None:
    issues = issues_of(run_of([*falling(), *[2.5] * 60, *[0.2] * 200]).records, specs=DIVERGED)
    assert [issue.state for issue in issues] == ["firing", "resolved"]


# -- loss_not_decreasing


def test_a_loss_that_never_falls_is_reported() -> None:
    chance = np.random.default_rng(0)
    issue = assert_fires(
        run_of(2.3 + 0.02 * chance.standard_normal(600)).records,
        "loss_not_decreasing",
        first_step=0,
        specs=SHORT,
    )
    assert (issue.severity, issue.stop_worthy) == ("warning", False)
    assert "has not fallen" in issue.reason


def test_a_loss_that_rises_for_long_is_reported() -> None:
    losses = np.concatenate([np.linspace(2.0, 0.5, 200), np.linspace(0.5, 3.0, 3000)])
    issues = issues_of(run_of(losses, per_frame=50).records, specs=FLAT)
    assert [i.state for i in issues] == ["firing"]
    assert "rising" in issues[0].reason


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param(falling(1200), id="falls, then a plateau"),
        pytest.param([1.0] * 30, id="thirty steps"),
        pytest.param([-0.001 * i for i in range(2000)], id="negative and falling"),
        pytest.param([float(x) for x in np.geomspace(2.3, 1e-6, 2000)], id="to zero"),
        pytest.param([math.nan] * 2000, id="all NaN"),
    ],
)
def test_runs_that_learn_are_left_alone(losses: list[float]) -> None:
    assert_quiet(run_of(losses, per_frame=10).records, specs=FLAT)


def test_evaluation_losses_are_watched_where_asked() -> None:
    run = RunBuilder()
    run.steps(range(500), mode="eval", loss=1.0)
    assert_quiet(run.records, specs=SHORT)
    specs = only("loss_not_decreasing", num_steps=40, mode="eval")
    assert_fires(run.records, "loss_not_decreasing", specs=specs)


def test_long_runs_are_remembered_in_bounded_space() -> None:
    run = run_of(np.full(5000, 2.0), per_frame=100)
    issue = assert_fires(run.records, "loss_not_decreasing", specs=FLAT)
    assert issue.evidence.series is not None
    assert len(issue.evidence.series.steps) <= 128


# -- a real run: one-step spikes from 3.8 to 5.1, which recover at once


def test_a_completed_gpt_training_gives_no_issue_at_all() -> None:
    losses = real_losses()
    assert len(losses) == 1530
    assert losses[900:].max() > 5
    assert issues_of(run_of(losses, per_frame=7).records) == []


def test_the_same_training_resumed_in_the_middle_gives_none() -> None:
    assert issues_of(run_of(real_losses()[300:], per_frame=7).records) == []


def test_the_same_training_with_its_learning_rate_at_zero_is_reported() -> None:
    chance = np.random.default_rng(0)
    stuck = 10.8 + 0.1 * chance.standard_normal(4000)
    assert_fires(run_of(stuck, per_frame=20).records, "loss_not_decreasing", specs=FLAT)
