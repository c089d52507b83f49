"""`loss_diverged` and `loss_not_decreasing` on made series and on a real one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tocsin.schemas.records.program_facts import OptimizersSeen
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
        run.loss_inputs(classes)
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


@pytest.mark.parametrize(("high", "stops"), [(98, False), (120, True)])
def test_losses_below_the_limit_are_not_counted_as_high(high: int, stops: bool) -> None:
    # It takes a hundred in a row above the limit; the medians are slower to follow.
    run = run_of([*[1.0] * 60, *[150.0] * high, *[0.5] * 60])
    issues = issues_of(run.records, specs=DIVERGED)
    assert any(issue.stop_worthy for issue in issues) is stops


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


def critic(seed: int) -> npt.NDArray[np.float64]:
    """What a value function's loss does while the values grow."""
    chance = np.random.default_rng(seed)
    grows = np.geomspace(0.02, 5.0 * 10 ** chance.uniform(0, 1), 40)
    later = grows[-1] * (1 + np.cumsum(0.02 * chance.standard_normal(400)))
    return np.abs(np.concatenate([grows, later]) * chance.lognormal(0, 0.5, 440))


@pytest.mark.parametrize(
    "losses",
    [
        [0.0, *[3.5 * 0.99**i for i in range(200)]],
        [0.03, *[3.5 * 0.99**i for i in range(200)]],
        [*np.geomspace(0.03, 10.0, 30), *[10.0 * 0.98**i for i in range(300)]],
        [*[0.02] * 60, *np.geomspace(0.02, 60.0, 20), *np.geomspace(60.0, 0.1, 200)],
        [*[0.011] * 12, *[1.3] * 300],
        *(critic(seed) for seed in range(8)),
    ],
    ids=[
        *("empty batch", "easy batch", "data in the order of time", "quiet for 60 steps"),
        *("a sparse reward", *map(str, range(8))),
    ],
)
@pytest.mark.parametrize("optimizers", [0, 1])
def test_a_first_batch_is_no_reference(losses: Losses, optimizers: int) -> None:
    issues = issues_of(run_of(losses, optimizers=optimizers).records, specs=DIVERGED)
    assert not any(issue.stop_worthy or issue.severity == "critical" for issue in issues)
    assert not any((issue.step or 0) < 49 for issue in issues)


def updates(run: RunBuilder, step: int, ratio: float) -> None:
    rows = [f"layer{i}.weight" for i in range(4)]
    run.tensors(step, "updates", rows, columns={"l2": 1.0, "update_l2": ratio})


@pytest.mark.parametrize(("ratio", "stops"), [(0.05, False), (3.0, True)])
def test_no_run_is_stopped_before_fifty_losses_unless_its_weights_are_ruined(
    ratio: float, stops: bool
) -> None:
    run = RunBuilder()
    run.started()
    run.loss_inputs(10)
    run.steps(range(2), loss=[2.3, 2.3])
    updates(run, 1, ratio)
    run.steps(range(2, 40), loss=4000.0)
    issues = issues_of(run.records, specs=DIVERGED)
    assert any(issue.stop_worthy for issue in issues) is stops
    assert {issue.first_step for issue in issues} == {2}
    run.steps(range(40, 60), loss=4000.0)
    assert any(issue.stop_worthy for issue in issues_of(run.records, specs=DIVERGED))


def test_a_regression_is_stopped_at_a_hundred_times_what_it_began_with() -> None:
    losses = [*np.geomspace(3.0, 0.5, 200), *np.geomspace(0.5, 1e5, 120), *[1e5] * 60]
    issues = issues_of(run_of(losses).records, specs=DIVERGED)
    assert [(i.severity, i.stop_worthy) for i in issues] == [("warning", False), ("critical", True)]


def test_nor_does_a_resumed_run_whose_next_stage_is_no_worse_than_a_guess() -> None:
    run = run_of([*[0.03] * 300, *[0.6] * 300], classes=10)
    assert not any(issue.stop_worthy for issue in issues_of(run.records, specs=DIVERGED))


def test_a_hundred_times_needs_ten_steps_only() -> None:
    run = run_of([*falling(), *[300.0] * 10], classes=10)
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


def test_a_cross_entropy_with_an_easy_beginning_has_not_diverged_below_a_guess() -> None:
    rising = [0.06, 0.07, 0.3, *(min(4.3, 0.5 * i) for i in range(1, 200))]
    for last, fires in ((rising, False), ([*rising, *[60.0] * 60], True)):
        run = RunBuilder()
        run.started()
        run.loss_inputs(256)
        run.steps(range(len(last)), loss=last)
        assert bool(issues_of(run.records, specs=DIVERGED)) is fires


@pytest.mark.parametrize("late", [False, True])
def test_a_cross_entropy_with_the_wrong_sign_is_known_at_once(late: bool) -> None:
    run = RunBuilder()
    run.started()
    if not late:
        run.loss_inputs(10)
    run.steps(range(10), loss=[-2.31 - 0.02 * i for i in range(10)])
    if late:
        run.loss_inputs(10)
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
    run.loss_inputs(classes, function="cross_entropy" if classes else "mse_loss")
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
    run = run_of([2.3, *[4000.0] * 15], classes=10)
    assert_fires(run.records, "loss_diverged", first_step=1, specs=DIVERGED)


@pytest.mark.parametrize("start", [0.0, 1e-9, -1e-8, 5e-4])
def test_a_loss_that_begins_near_zero_stops_nothing(start: float) -> None:
    run = run_of([*[start] * 30, *[0.02] * 170])
    assert not any(issue.stop_worthy for issue in issues_of(run.records, specs=DIVERGED))


def of_optimizers(losses: Losses, *, own: int | None) -> RunBuilder:
    """A run of two optimizers; how many losses they have is known from the second step on."""
    run = RunBuilder()
    run.started(optimizers=2)
    run.loss_inputs(10)
    run.steps([0], loss=losses[0])
    if own is not None:
        run.event(
            OptimizersSeen(
                run_id=run.run_id,
                incarnation=run.incarnation,
                optimizers=2,
                losses=own,
                step=1,
            )
        )
    run.steps(range(1, len(losses)), loss=losses[1:])
    return run


@pytest.mark.parametrize(("own", "stops"), [(None, False), (2, False), (1, True)])
def test_optimizers_of_one_loss_are_as_one(own: int | None, stops: bool) -> None:
    run = of_optimizers([*falling(), *[400.0] * 60], own=own)
    issues = issues_of(run.records, specs=DIVERGED)
    assert {issue.rule for issue in issues} == {"loss_diverged"}
    assert any(issue.stop_worthy for issue in issues) is stops


YOLO = [
    *(7.7, 61.2, 25.3, 13.1, 11.7, 71.7, 6.87, 22.7, 8.49, 31.8, 23.5, 3.68, 60.6, 15.7, 25.9),
    *(42.5, 75.1, 41.8, 44.1, 65.9, 22.3, 76.6, 71.6, 70.7, 86.7, 59.8, 68.8, 62.0, 64.4, 44.9),
    *(73.3, 65.5, 60.2, 63.2, 51.2, 60.2, 53.7, 55.4, 57.9, 63.7, 46.9, 61.6, 48.8, 62.9, 45.7),
    *(42.7, 49.5, 46.2, 51.3, 42.3, 40.8, 54.2, 49.0, 50.0, 45.2, 42.7, 49.2),
]
"""The mean loss of each step of a healthy detector: its boxes, their kinds, their edges, all times
the eight images of a batch. No box is found in the first steps."""


def of_detector(means: list[float], *, most: int) -> RunBuilder:
    """One micro-batch in each of the first 12 steps, then up to `most`, whose losses are added."""
    run = RunBuilder()
    run.started()
    run.loss_inputs(0, function="binary_cross_entropy_with_logits")
    run.steps(range(12), loss=means[:12])
    counts = np.minimum(np.arange(2, 2 + len(means) - 12), most)
    run.steps(
        range(12, len(means)),
        loss=means[12:] * counts,
        loss_mean=means[12:],
        micro_batches=counts,
    )
    return run


@pytest.mark.parametrize("most", [1, 2, 16])
def test_a_loss_that_is_a_sum_is_compared_with_no_guess(most: int) -> None:
    later = [47.0 + (i * 7) % 5 for i in range(400)]
    assert_quiet(of_detector([*YOLO, *later], most=most).records)


@pytest.mark.parametrize(("ruined", "stops"), [(400.0, False), (40_000.0, True)])
def test_a_sum_that_diverges_is_found(ruined: float, stops: bool) -> None:
    run = of_detector([*YOLO, *[47.0] * 60, *[ruined] * 200], most=2)
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    assert issues
    assert any(issue.stop_worthy for issue in issues) is stops


@pytest.mark.parametrize(("batches", "fires"), [(16, True), (1, False)])
def test_losses_of_micro_batches_that_are_not_divided_are_compared_with_their_guesses(
    batches: int, fires: bool
) -> None:
    """Sixteen losses of five classes: 16 · ln 5 is 25.8. It explodes at once, then is at chance."""
    run = RunBuilder()
    run.started()
    run.loss_inputs(5)
    losses = [26.2, 15.7, 32.5, 507.0, 1553.0, 12550.0, 44880.0, 58730.0, 26670.0, 1.5e6]
    losses += [28570.0, 1505.0, 283800.0, *[26.0] * 200]
    run.steps(range(len(losses)), loss=losses, columns={"micro_batches": float(batches)})
    issues = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    assert [(i.state, i.first_step) for i in issues if i.state == "firing"] == [
        ("firing", 3)
    ] * fires
    assert not any(issue.stop_worthy for issue in issues)


def test_how_far_it_has_risen_can_be_checked() -> None:
    run = run_of([*[1.0] * 100, *[0.5] * 60, *[8.0] * 25], classes=10)
    (issue, *_) = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    assert "is 8, 16 times the reference of 0.5; above" in issue.reason
    run = run_of([*[2.0] * 25, *[0.0] * 200, *[6.0] * 25], classes=10)
    (issue, *_) = issues_of(run.records, "loss_diverged", specs=DIVERGED)
    facts = {fact.name: fact.value for fact in issue.evidence.facts}
    assert f"times the spread of the losses ({facts['scale']:.4g}) above the" in issue.reason
    assert f"reference of {facts['reference']:.4g};" in issue.reason


def test_more_micro_batches_whose_losses_are_divided_are_no_fall_and_no_rise() -> None:
    run = RunBuilder()
    run.started()
    counts = np.asarray([4] * 100 + [16] * 300)
    run.steps(range(400), loss=2.0, loss_mean=2.0 / counts, micro_batches=counts)
    assert issues_of(run.records, specs=DIVERGED) == []


def balancing(seed: int) -> npt.NDArray[np.float64]:
    """The loss of PPO whose episodes get longer, and of DQN when its target is copied."""
    chance = np.random.default_rng(seed)
    falls = np.geomspace(54.0, 9.5, 320)
    rises = np.geomspace(9.5, 60.0, 400)
    later = np.concatenate([np.geomspace(60.0, 0.01, 300), np.full(300, 2.0)])
    return np.concatenate([falls, rises, later]) * chance.lognormal(0, 0.1, 1320)


@pytest.mark.parametrize("environment", [False, True])
def test_a_model_that_acts_in_an_environment_may_lose_more(environment: bool) -> None:
    run = RunBuilder()
    run.started(environment=environment)
    run.steps(range(1320), loss=balancing(0))
    issues = issues_of(run.records, specs=[*DIVERGED, *only("loss_spike"), *FLAT])
    found = {issue.rule for issue in issues}
    assert found == (set() if environment else {"loss_diverged", "loss_spike"})


def test_a_loss_of_it_that_is_nan_stops() -> None:
    run = RunBuilder()
    run.started(environment=True)
    run.steps(range(100), loss=[*balancing(0)[:99], math.nan])
    assert any(i.rule == "nonfinite" and i.stop_worthy for i in issues_of(run.records))


@pytest.mark.parametrize("own", [1, 2])
def test_a_loss_of_several_optimizers_that_never_falls(own: int) -> None:
    chance = np.random.default_rng(0)
    run = of_optimizers([float(x) for x in 2.3 + 0.02 * chance.standard_normal(600)], own=own)
    assert bool(issues_of(run.records, specs=SHORT)) is (own == 1)


def test_losses_that_are_logged_without_an_optimizer_are_judged() -> None:
    issues = issues_of(run_of([*falling(), *[30.0] * 60], optimizers=0, classes=10).records)
    assert any(issue.rule == "loss_diverged" and issue.stop_worthy for issue in issues)


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


def test_the_losses_before_a_fast_fall_are_no_rise() -> None:
    """A classifier that learns all within its first hundred steps, as examples/lightning does."""
    steps = np.arange(276)
    losses = 0.1 + 2.2 / (1 + np.exp((steps - 38) / 5))
    assert_quiet(run_of(losses, classes=10).records, specs=DIVERGED)


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


def evaluated(first_batches: Losses, others: Losses) -> RunBuilder:
    """Evaluations of four batches each, after each fifth training step."""
    run = RunBuilder()
    for i, (first, other) in enumerate(zip(first_batches, others, strict=True)):
        run.steps(range(5 * i, 5 * i + 5), loss=1.0, per_frame=5)
        for loss in (first, other, other, other):
            run.steps([5 * i + 4], mode="eval", loss=loss)
    run.ended()
    return run


def test_the_mean_of_an_evaluation_counts_and_not_its_first_batch() -> None:
    same, falling = np.full(400, 1.0), np.linspace(2.0, 0.5, 400)
    for specs in (
        only("loss_not_decreasing", num_steps=40, mode="eval"),
        only("loss_not_decreasing", num_steps=40, mode="eval", against="before", patience=2),
    ):
        assert_quiet(evaluated(same, falling).records, specs=specs)
        issue = assert_fires(
            evaluated(4 - 3 * falling, falling).records, "loss_not_decreasing", specs=specs
        )
        assert issue.branch == "flat"
        assert issue.first_rank == 0


def test_the_last_evaluation_counts_at_the_end_of_the_run() -> None:
    specs = only("loss_not_decreasing", num_steps=20, mode="eval", patience=1)
    ones = np.full(20, 1.0)
    issue = assert_fires(evaluated(ones, ones).records, "loss_not_decreasing", specs=specs)
    assert "in 20 losses" in issue.reason


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
