"""`weight_update_ratio` at the first steps, where a rate far too high shows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from support.rules.restarts import told_with_restarts
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

RATIO = only("weight_update_ratio")
ROWS = ("3.weight", "2.weight", "1.weight", "1.bias")


def first_steps(
    losses: Sequence[float], ratios: Sequence[float], *, losses_first: bool = False, rank: int = 0
) -> RunBuilder:
    """The last of the rows began at zero: its change is its norm."""
    run = RunBuilder(world_size=2)
    run.started()
    if losses_first:
        run.steps(range(len(losses)), rank=rank, loss=losses)
    run.tensors(0, "updates", ROWS, columns={"update_l2": [*ratios, 1.0], "l2": 1.0})
    if not losses_first:
        run.steps(range(len(losses)), rank=rank, loss=losses)
    return run


@pytest.mark.parametrize("losses_first", [False, True])
@pytest.mark.parametrize("then", [9.0, math.nan])
def test_weights_that_are_thrown_away_are_said_when_the_loss_shows_it(
    losses_first: bool, then: float
) -> None:
    run = first_steps([2.3, 2.5, then, 2.0], [0.9, 0.99, 0.8], losses_first=losses_first)
    issue = assert_fires(run.records, "weight_update_ratio", first_step=0, specs=RATIO)
    assert (issue.branch, issue.severity, issue.subject.name) == ("large", "warning", "2.weight")
    assert "at step 2" in issue.reason
    told = [one.issue.model_dump_json() for one in replay(run.records, RATIO)]
    assert told_with_restarts(run.records, RATIO, every=1) == told


@pytest.mark.parametrize(
    ("losses", "ratios"),
    [
        ([2.3, 4.0, 3.0], [0.9, 0.9, 0.9]),
        ([2.3] * 15 + [900.0], [0.9, 0.9, 0.9]),
        ([2.3, 900.0], [0.1, 0.1, 0.9]),
        ([1e-4, 5.0], [0.9, 0.9, 0.9]),
        ([-1.0, 5.0], [0.9, 0.9, 0.9]),
    ],
    ids=["the loss is well", "much later", "few weights", "from nothing", "negative"],
)
def test_a_beginning_that_may_be_well(losses: list[float], ratios: list[float]) -> None:
    assert issues_of(first_steps(losses, ratios).records, specs=RATIO) == []


def test_weights_that_began_at_zero_do_not_count() -> None:
    run = first_steps([2.3, 900.0], [1.0, 1.0, 0.01])
    assert issues_of(run.records, specs=RATIO) == []


@pytest.mark.parametrize(
    ("losses", "fires"), [([2.3, 9.3], True), ([2.3, 9.1], False), ([2.3, math.nan], False)]
)
def test_a_loss_that_is_four_times_as_high_needs_less(losses: list[float], fires: bool) -> None:
    run = first_steps(losses, [0.1, 0.4, 0.4])
    assert [i.branch for i in issues_of(run.records, specs=RATIO)] == ["large"] * fires


def of_many(ratio: float, size: float, tensors: int = 8) -> RunBuilder:
    run = RunBuilder()
    run.started()
    rows = [f"{i}.weight" for i in range(tensors)]
    run.tensors(0, "updates", rows, columns={"update_l2": ratio * size, "l2": size})
    run.steps(range(6), loss=[4.9, 3.9, 4.1, 3.9, 3.9, 3.7])
    return run


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(of_many(0.6, 1.5), id="by too little"),
        pytest.param(of_many(0.4, 9.0), id="large weights"),
        pytest.param(of_many(0.6, 9.0, tensors=7), id="a small model"),
    ],
)
def test_a_large_step_that_may_be_well(run: RunBuilder) -> None:
    assert issues_of(run.records, specs=RATIO) == []


def test_weights_of_many_that_a_step_has_made_are_named_at_once() -> None:
    run = of_many(0.6, 2.0)
    issue = assert_fires(run.records, "weight_update_ratio", first_step=0, specs=RATIO)
    assert (issue.branch, issue.severity) == ("large", "warning")
    assert "by a norm of 1.2" in issue.reason
    told = [one.issue.model_dump_json() for one in replay(run.records, RATIO)]
    assert told_with_restarts(run.records, RATIO, every=1) == told
