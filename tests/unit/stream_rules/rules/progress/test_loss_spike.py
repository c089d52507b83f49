"""`loss_spike` on made series, and on a real training with a few corrupt batches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tocsin.console.demo.trainings.resnet import batches, digits
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

SPECS = only("loss_spike")


def noisy(steps: int, level: float = 2.0, seed: int = 0) -> list[float]:
    chance = np.random.default_rng(seed)
    return [float(x) for x in level + 0.02 * chance.standard_normal(steps)]


def run_of(
    losses: list[float], *, per_frame: int = 1, first: int = 0, optimizers: int = 1
) -> RunBuilder:
    run = RunBuilder()
    run.started(optimizers=optimizers)
    run.steps(range(first, first + len(losses)), loss=losses, per_frame=per_frame)
    return run


def test_a_jump_that_stays_is_a_warning() -> None:
    run = run_of([*noisy(150), *noisy(10, 3.0)])
    issue = assert_fires(run.records, "loss_spike", first_step=150, specs=SPECS)
    assert (issue.severity, issue.stop_worthy, issue.step) == ("warning", False, 159)


def test_one_that_does_not_recover_is_critical_and_never_worth_a_stop() -> None:
    issues = issues_of(run_of([*noisy(150), *noisy(120, 300.0), *noisy(9)]).records, specs=SPECS)
    assert [(i.severity, i.state, i.step) for i in issues] == [
        ("warning", "firing", 159),
        ("critical", "ongoing", 249),
        ("critical", "resolved", 272),
    ]
    assert len({i.issue_id for i in issues}) == 1
    assert issues[1].turned_critical
    assert "has not recovered" in issues[1].reason
    assert not any(i.stop_worthy for i in issues)


def test_a_harder_task_is_a_warning_however_long_it_lasts() -> None:
    for before, after in ((0.05, 0.5), (2.0, 6.0)):
        losses = [2.0, *noisy(150, before), *noisy(500, after)]
        issues = issues_of(run_of(losses).records, specs=SPECS)
        assert {i.severity for i in issues} == {"warning"}


def test_a_severity_that_was_configured_does_not_rise() -> None:
    specs = (replace(SPECS[0], severity="warning"),)
    issues = issues_of(run_of([*noisy(150), *noisy(120, 30.0)]).records, specs=specs)
    assert [(i.severity, i.state) for i in issues] == [("warning", "firing")]


def test_a_spike_that_recovers_resolves_itself() -> None:
    issues = issues_of(run_of([*noisy(150), *noisy(40, 3.0), *noisy(50)]).records, specs=SPECS)
    assert [i.state for i in issues] == ["firing", "resolved"]
    assert issues[1].step == 192


def test_a_second_spike_soon_after_is_the_same_issue_again() -> None:
    losses = [*noisy(150), *noisy(20, 3.0), *noisy(50), *noisy(20, 3.0), *noisy(150)]
    issues = issues_of(run_of(losses, per_frame=7).records, specs=SPECS)
    assert [(i.state, i.times) for i in issues] == [
        ("firing", 1),
        ("resolved", 1),
        ("firing", 2),
        ("resolved", 2),
    ]
    assert len({i.issue_id for i in issues}) == 1


def test_a_loss_that_jumps_each_sixty_steps_is_one_issue() -> None:
    losses = noisy(150) + [x for _ in range(30) for x in (*noisy(12, 3.0), *noisy(48))]
    issues = issues_of(run_of(losses, per_frame=20).records, specs=SPECS)
    assert len({i.issue_id for i in issues}) == 1
    assert [i.state for i in issues] == ["firing", "resolved", "firing"]


def test_a_loss_that_stays_up_is_unrecovered_until_it_is_back() -> None:
    up = run_of([*noisy(150), *noisy(2000, 3.0)])
    (issue,) = issues_of(up.records, specs=[replace(SPECS[0], severity="warning")])
    assert issue.state == "firing"
    back = run_of([*noisy(150), *noisy(2000, 3.0), *noisy(20)])
    assert [(i.state, i.step) for i in issues_of(back.records, specs=SPECS)] == [
        ("firing", 159),
        ("resolved", 2152),
    ]


def test_what_is_told_of_it_later_says_so() -> None:
    run = run_of([*noisy(150), *noisy(298, 3.0)])
    run.wait(1200)
    run.steps(range(448, 452), loss=3.0)
    issue = issues_of(run.records, specs=SPECS)[-1]
    state = {fact.name: fact.value for fact in issue.evidence.facts}["state"]
    assert (issue.state, state) == ("ongoing", "lasting")
    assert "has not recovered" in issue.reason


def test_a_spike_above_the_new_losses_is_an_issue_of_its_own() -> None:
    losses = [*noisy(150), *noisy(800, 3.0), *noisy(20, 5.0), *noisy(120, 3.0), *noisy(20)]
    issues = issues_of(run_of(losses).records, specs=SPECS)
    assert [(i.state, i.first_step) for i in issues] == [
        ("firing", 150),
        ("firing", 950),
        ("resolved", 950),
        ("resolved", 150),
    ]
    assert issues[0].issue_id == issues[3].issue_id


def test_levels_are_remembered_in_bounded_space() -> None:
    levels = [noisy(400, 2.0 * 1.5**n) for n in range(12)]
    run = run_of([loss for level in levels for loss in level])
    firing = [i for i in issues_of(run.records, specs=SPECS) if i.state == "firing"]
    assert len(firing) == 4


def test_what_ended_it_is_said() -> None:
    issues = issues_of(run_of([*noisy(150), *noisy(120, 3.0), *noisy(9)]).records, specs=SPECS)
    assert issues[-1].state == "resolved"
    assert "the loss is back at" in issues[-1].reason
    assert "has not recovered" not in issues[-1].reason
    assert "for 120 losses" in issues[-1].reason


def mostly_zero(zeros: float, seed: int) -> list[float]:
    """A hinge loss of a task that is nearly learned."""
    chance = np.random.default_rng(seed)
    late = np.where(chance.random(2000) < zeros, 0.0, chance.exponential(0.01, 2000))
    return [float(x) for x in np.concatenate([np.linspace(1, 0.01, 200), late])]


@pytest.mark.parametrize("zeros", [0.3, 0.5, 0.6, 0.8, 0.95])
def test_a_loss_that_is_zero_for_most_batches_is_no_spike(zeros: float) -> None:
    for seed in range(4):
        assert_quiet(run_of(mostly_zero(zeros, seed), per_frame=100).records, specs=SPECS)


def test_a_spike_of_such_a_loss_is_one() -> None:
    losses = [*mostly_zero(0.6, 0), *noisy(20, 1.0)]
    assert_fires(run_of(losses, per_frame=20).records, "loss_spike", first_step=2200, specs=SPECS)


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([*noisy(150), *noisy(9, 5.0), *noisy(50)], id="nine steps"),
        pytest.param([*noisy(150), *[5.0, 2.0, 2.0, 2.0] * 20], id="single steps"),
        pytest.param(noisy(30), id="thirty steps"),
        pytest.param([*noisy(30), *noisy(60, 5.0)], id="before the window is full"),
        pytest.param([math.nan] * 300, id="all NaN"),
        pytest.param([0.0] * 300, id="all zero"),
        pytest.param([1.0] * 200 + [1.05] * 100, id="a step within ten percent"),
        pytest.param([-2.0 - 0.01 * i for i in range(400)], id="negative and falling"),
        pytest.param([float(x) for x in np.linspace(1, 3, 3000)], id="a slow rise"),
    ],
)
def test_left_alone(losses: list[float]) -> None:
    assert_quiet(run_of(losses).records, specs=SPECS)


def rising(over: int, level: float = 3.0) -> list[float]:
    return [float(x) for x in np.linspace(2.0, level, over, endpoint=False)]


def test_a_rise_over_tens_of_steps_of_losses_that_work_against_each_other_is_no_spike() -> None:
    """A generator's loss: it has risen from 0.68 to 0.99 in 30 steps, in a noise of 0.01."""
    wave = [*noisy(150), *rising(30), *noisy(40, 3.0), *rising(30)[::-1], *noisy(50)]
    assert_quiet(run_of(wave, optimizers=2).records, specs=SPECS)
    stays = [*noisy(150), *rising(30), *noisy(800, 3.0)]
    assert_quiet(run_of(stays, optimizers=2).records, specs=SPECS)
    assert_fires(run_of(wave).records, "loss_spike", specs=SPECS)


@pytest.mark.parametrize("over", [0, 5])
def test_a_jump_of_losses_that_work_against_each_other_is_one(over: int) -> None:
    jump = [*noisy(150), *rising(over), *noisy(40, 3.0), *noisy(50)]
    issues = issues_of(run_of(jump, optimizers=2).records, specs=SPECS)
    assert [i.state for i in issues] == ["firing", "resolved"]
    assert 150 <= (issues[0].first_step or 0) <= 152
    later = [*noisy(150), *rising(30), *noisy(40, 3.0), *noisy(40, 6.0), *noisy(50)]
    assert_fires(run_of(later, optimizers=2).records, "loss_spike", specs=SPECS)


def test_no_number_is_neither_high_nor_a_recovery() -> None:
    losses = [*noisy(150), *noisy(5, 3.0), *[math.nan] * 20, *noisy(5, 3.0)]
    assert_fires(run_of(losses).records, "loss_spike", first_step=150, specs=SPECS)


def test_duplicates_gaps_and_a_higher_rank_change_nothing() -> None:
    run = RunBuilder(world_size=2)
    losses = [*noisy(150), *noisy(12, 3.0)]
    for step, loss in enumerate(losses):
        run.steps([step + 10 * (step > 100)], rank=1, loss=50.0)
        run.steps([step + 10 * (step > 100)], loss=loss)
        run.again(run.records[-1])
    assert_fires(run.records, "loss_spike", specs=only("loss_spike"))
    (issue,) = issues_of(run.records, specs=SPECS)
    assert (issue.first_rank, issue.first_step) == (0, 160)


def test_a_resumed_run_starts_anew() -> None:
    run = run_of(noisy(150))
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started()
    run.steps(range(150, 250), loss=noisy(100, 3.0))
    assert_quiet(run.records, specs=SPECS)


@cache
def train(*, corrupt: int) -> RunBuilder:
    """A perceptron on handwritten digits; `corrupt` batches in a row are of random labels."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = batches(*digits(), batch=64, seed=0)
    run = RunBuilder()
    run.started()
    for step in range(400):
        images, labels = next(data)
        if 300 <= step < 300 + corrupt:
            labels = (labels + 1) % 10
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.steps([step], loss=loss.item())
    return run


def test_wrong_labels_for_a_while_are_seen_at_their_first_step() -> None:
    assert_fires(train(corrupt=15).records, "loss_spike", first_step=300, specs=SPECS)


@pytest.mark.parametrize("corrupt", [0, 3])
def test_without_them_or_with_three_of_them_it_is_quiet(corrupt: int) -> None:
    assert_quiet(train(corrupt=corrupt).records, specs=SPECS)
