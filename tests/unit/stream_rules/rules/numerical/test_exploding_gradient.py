"""`exploding_gradient` on made series, and on the published spike of BLOOM's training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

SPECS = only("exploding_gradient")


def run_of(
    norms: list[float], losses: list[float] | None = None, *, per_frame: int = 1
) -> RunBuilder:
    run = RunBuilder()
    run.started()
    losses = losses or [2.0] * len(norms)
    run.steps(
        range(len(norms)),
        loss=losses,
        gradient_norm=norms,
        gradient_nonfinite=0,
        per_frame=per_frame,
    )
    return run


def test_two_outliers_in_a_row_fire() -> None:
    assert_fires(
        run_of([1.0] * 50 + [30.0, 30.0]).records, "exploding_gradient", first_step=50, specs=SPECS
    )


def test_one_outlier_does_not() -> None:
    assert_quiet(run_of([1.0] * 50 + [30.0] + [1.0] * 50).records, specs=SPECS)


def clipped(norms: list[float], losses: list[float] | None = None) -> RunBuilder:
    run = RunBuilder()
    run.started()
    left = [min(1.0, norm) for norm in norms]
    losses = losses or [2.0] * len(norms)
    steps = range(len(norms))
    run.steps(steps, loss=losses, gradient_norm=norms, gradient_norm_clipped=left)
    return run


def test_outliers_that_were_clipped_are_left_alone_unless_they_are_huge_or_the_loss_follows() -> (
    None
):
    outliers = [1.0] * 50 + [30.0] * 4
    assert_quiet(clipped(outliers).records, specs=SPECS)
    losses = [2.0] * 52 + [9.0, 20.0]
    issue = assert_fires(clipped(outliers, losses).records, "exploding_gradient", specs=SPECS)
    assert (issue.severity, issue.first_step) == ("warning", 50)
    assert_fires(clipped([*outliers, 500.0]).records, "exploding_gradient", specs=SPECS)


def test_a_huge_one_fires_at_once() -> None:
    issue = assert_fires(
        run_of([1.0] * 50 + [500.0]).records, "exploding_gradient", first_step=50, specs=SPECS
    )
    assert (issue.severity, issue.stop_worthy) == ("warning", False)


def test_nothing_fires_during_warm_up() -> None:
    assert_quiet(run_of([1e-3] * 10 + [900.0] * 9 + [800.0] * 40).records, specs=SPECS)


def test_gradients_that_were_zero_are_no_measure() -> None:
    assert_quiet(run_of([0.0] * 30 + [1.0] * 30).records, specs=SPECS)


def test_a_memorised_data_set_may_have_an_ordinary_batch() -> None:
    norms = list(np.geomspace(2.0, 1e-3, 400)) + [1e-3] * 300 + [0.5, 0.4, 0.3] + [1e-3] * 20
    assert_quiet(run_of([float(n) for n in norms]).records, specs=SPECS)


@pytest.mark.parametrize("per_frame", [1, 7, 300])
def test_it_is_critical_once_the_loss_has_stayed_up_for_fifty_steps(per_frame: int) -> None:
    losses = [2.0] * 51 + [9.0, 20.0] + [15.0] * 100 + [2.0] * 60
    norms = [1.0] * 50 + [30.0, 40.0, 900.0] + [1.0] * 160
    run = run_of(norms, losses, per_frame=per_frame)
    issues = issues_of(run.records, specs=SPECS)
    assert [(i.severity, i.state, i.stop_worthy) for i in issues] == [
        ("warning", "firing", False),
        ("critical", "ongoing", False),
        ("critical", "resolved", False),
    ]
    assert "stays high" in issues[1].reason
    assert "near its moving average" in issues[2].reason
    if per_frame == 1:
        assert [i.step for i in issues[:2]] == [51, 101]


def test_a_loss_that_stays_up_has_a_new_level_after_five_hundred_steps() -> None:
    norms = [1.0] * 50 + [30.0, 40.0, 900.0] + [1.0] * 997
    losses = [2.0] * 51 + [9.0, 20.0] + [9.0] * 997
    issues = issues_of(run_of(norms, losses).records, specs=SPECS)
    assert [(i.severity, i.state, i.step) for i in issues] == [
        ("warning", "firing", 51),
        ("critical", "ongoing", 101),
        ("critical", "resolved", 552),
    ]
    assert "the loss has not recovered: it is 9 after 2" in issues[2].reason
    # Later outliers are judged by the new level: nine is no loss that follows, 30 is.
    norms += [30.0, 40.0, 900.0] + [1.0] * 200
    for level, severity in ((9.0, "warning"), (30.0, "critical")):
        again = issues_of(run_of(norms, [*losses, *[level] * 203]).records, specs=SPECS)[3:]
        assert again[-1].severity == severity


def test_outliers_that_go_on_keep_their_issue_open() -> None:
    norms = [1.0] * 50 + [30.0, 40.0, 900.0] + ([1.0] * 298 + [900.0] * 2) * 4
    losses = [2.0] * 51 + [9.0] * (len(norms) - 51)
    issues = issues_of(run_of(norms, losses).records, specs=SPECS)
    assert "resolved" not in {issue.state for issue in issues}


def test_a_loss_that_follows_and_is_back_within_fifty_steps_is_no_more_than_a_warning() -> None:
    losses = [2.0] * 52 + [20.0] * 40 + [2.0] * 60
    issues = issues_of(run_of([1.0] * 50 + [30.0, 40.0] + [1.0] * 100, losses).records, specs=SPECS)
    assert [(i.severity, i.state) for i in issues] == [
        ("warning", "firing"),
        ("warning", "resolved"),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_no_numbers_are_left_to_another_rule(value: float) -> None:
    assert_quiet(run_of([1.0] * 50 + [value] * 5 + [1.0] * 50).records, specs=SPECS)


def test_the_first_spike_of_bloom_is_seen_before_the_loss_shows_it() -> None:
    chance = np.random.default_rng(0)
    norms = [float(n) for n in 0.24 + 0.02 * chance.standard_normal(200)]
    norms += [0.242, 0.947, 2.39, 15.9, 145.0, 960.0]
    norms += [float(n) for n in np.geomspace(300, 0.4, 12)] + [0.3] * 40
    losses = [2.2] * 200 + [2.20, 2.22, 2.60, 2.24, 2.35, 5.10]
    losses += [float(n) for n in np.linspace(4, 2.3, 12)] + [2.25] * 40
    run = run_of(norms, losses)
    issues = issues_of(run.records)
    first = issues[0]
    assert first.rule == "exploding_gradient"
    assert first.step is not None
    assert losses[first.step] < 2.7
    assert {issue.severity for issue in issues} == {"warning"}
    resolved = [i for i in issues if i.state == "resolved" and i.issue_id == first.issue_id]
    assert resolved[0].step is not None
    assert resolved[0].step - first.step <= 35


def test_a_higher_rank_is_not_mixed_in() -> None:
    run = RunBuilder(world_size=2)
    run.steps(range(50), rank=1, gradient_norm=1e-4)
    run.steps(range(50), rank=0, gradient_norm=1.0)
    run.steps(range(50, 60), rank=1, gradient_norm=1e-4)
    run.steps(range(50, 60), rank=0, gradient_norm=1.0)
    assert_quiet(run.records, specs=SPECS)


def sampled(norms: list[float], exact: dict[int, float]) -> RunBuilder:
    """A run whose norm is estimated at each step but some."""
    run = RunBuilder()
    run.started()
    for step, norm in enumerate(norms):
        name = "gradient_norm" if step in exact else "gradient_norm_sampled"
        run.steps([step], columns={"loss": 2.0, name: exact.get(step, norm)})
    return run


def test_estimates_are_learned_from_and_fire_nothing() -> None:
    assert_quiet(sampled([1.0] * 50 + [500.0] * 50, {}).records, specs=SPECS)
    exact = {50: 30.0, 51: 30.0}
    assert_fires(
        sampled([1.0] * 60, exact).records, "exploding_gradient", first_step=50, specs=SPECS
    )
    assert_quiet(sampled([25.0] * 60, exact).records, specs=SPECS)


def test_estimates_say_nothing_of_the_largest_norm() -> None:
    # Of a block that is not like the rest: 16 times the norm, which is 1.
    estimates = [16.0 if step == 45 else 1.0 for step in range(60)]
    exact = {0: 1.0, 50: 30.0, 51: 30.0}
    assert_fires(
        sampled(estimates, exact).records, "exploding_gradient", first_step=50, specs=SPECS
    )


def test_an_estimate_between_two_outliers_does_not_part_them() -> None:
    exact = {0: 1.0, 50: 30.0, 52: 30.0}
    assert_fires(
        sampled([1.0] * 60, exact).records, "exploding_gradient", first_step=50, specs=SPECS
    )


def test_estimates_speak_for_healthy_steps_once_an_exact_norm_has() -> None:
    exact = {50: 30.0, 51: 30.0}
    issues = issues_of(sampled([1.0] * 120, exact).records, specs=SPECS)
    assert [issue.state for issue in issues] == ["firing"]
    issues = issues_of(sampled([1.0] * 120, {**exact, 53: 1.0}).records, specs=SPECS)
    assert [issue.state for issue in issues] == ["firing", "resolved"]


def test_an_estimate_that_is_no_number_is_not_learned() -> None:
    estimates = [math.inf if step == 5 else 1.0 for step in range(60)]
    exact = {50: 30.0, 51: 30.0}
    assert_fires(
        sampled(estimates, exact).records, "exploding_gradient", first_step=50, specs=SPECS
    )
