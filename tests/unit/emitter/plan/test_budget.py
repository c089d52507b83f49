"""The budget of capture: pure, so that what it decides can be read off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.emitter.plan.budget import (
    ALLOWANCE_S,
    LADDER,
    MAX_PASSED,
    MIN_S,
    UNMEASURED,
    Budget,
)

WEIGHTS = {"blocks": (1, 4.0), "gradients": (10, 3.0), "weights": (10, 3.0)}


def budget(share: float = 0.005, **costs: float) -> Budget:
    """One that has used up its allowance, with these costs a pass, in seconds."""
    made = Budget(share, WEIGHTS)
    made.add("gradients", ALLOWANCE_S)
    for name, cost in costs.items():
        for _ in range(8):
            made.add(name, cost)
    return made


def cost_a_step(made: Budget) -> float:
    """What the passes cost a step at the intervals in force, seconds."""
    return sum(share.cost_s / share.interval for share in made.shares.values())


def test_the_first_passes_are_free() -> None:
    made = Budget(0.005, WEIGHTS)
    made.add("gradients", ALLOWANCE_S / 2)
    made.review([1e-3] * 32, 1e-4)
    assert made.interval("gradients") == 10
    made.add("gradients", ALLOWANCE_S / 2)
    made.review([1e-3] * 32, 1e-3)
    assert made.interval("gradients") == LADDER[-1]


def test_one_that_is_fixed_keeps_its_floors_whatever_they_cost() -> None:
    made = Budget(0.005, WEIGHTS, fixed=True)
    for name in WEIGHTS:
        made.add(name, 10.0)
    made.review([1e-3] * 32, 1.0)
    assert [made.interval(name) for name in WEIGHTS] == [1, 10, 10]


def test_what_fits_keeps_its_floor_and_leaves_the_rest_to_the_others() -> None:
    made = budget(blocks=1e-4, gradients=5e-3, weights=5e-3)
    made.review([1.0] * 32, 1e-5)  # 5 ms a step: all fits
    assert {name: made.interval(name) for name in WEIGHTS} == {
        "blocks": 1, "gradients": 10, "weights": 10,
    }  # fmt: skip
    made.review([0.1] * 32, 1e-5)  # 500 µs: the blocks fit, the others share 390 µs
    assert (made.interval("blocks"), made.interval("gradients")) == (1, 50)


def test_short_steps_have_twenty_microseconds() -> None:
    made = budget(blocks=5e-6, gradients=1e-4, weights=1e-4)
    made.review([5e-4] * 32, 10e-6)
    assert cost_a_step(made) <= MIN_S - 10e-6


def test_it_is_never_blind_where_the_step_itself_is_over_the_budget() -> None:
    made = budget(blocks=5e-6, gradients=1e-4, weights=1e-4)
    made.review([5e-4] * 32, 1e-3)
    assert cost_a_step(made) <= 0.1 * MIN_S
    assert made.interval("gradients") < LADDER[-1]


@pytest.mark.parametrize(
    ("step_s", "base_s", "every"),
    [
        (1e-3, 1e-6, 1),  # costs next to nothing
        (1e-3, 20e-6, 10),
        (1e-3, 1e-3, MAX_PASSED),
        (5e-3, 25e-6, 1),  # no short step: 25 µs are allowed
        (5e-3, 40e-6, 10),
        (20e-3, 2e-3, MAX_PASSED),  # twenty times what is allowed
    ],
)
def test_steps_are_looked_at_less_often_where_each_costs_too_much(
    step_s: float, base_s: float, every: int
) -> None:
    made = budget()
    made.review([step_s] * 32, base_s)
    assert made.looks_every == every


def test_steps_are_looked_at_again_where_they_get_longer() -> None:
    made = budget()
    made.review([1e-3] * 32, 50e-6)
    assert made.looks_every == 20
    made.review([1e-3] * 32, 40e-6)
    assert made.looks_every == 20  # not with every breath
    made.review([0.1] * 32, 50e-6)
    assert made.looks_every == 1


def test_steps_with_more_hooks_are_looked_at_less_often_and_leave_less_for_summaries() -> None:
    plain, accumulates = budget(gradients=1e-3), budget(gradients=1e-3)
    accumulates.calls = 9
    for made in (plain, accumulates):
        made.review([1e-3] * 32, 20e-6)
    assert (plain.looks_every, accumulates.looks_every) == (10, 50)
    assert accumulates.interval("gradients") > plain.interval("gradients")


def test_one_slow_pass_does_not_change_the_interval() -> None:
    made = budget(blocks=1e-4, gradients=5e-3, weights=5e-3)
    made.review([0.1] * 32, 1e-5)
    before = made.interval("gradients")
    made.add("gradients", 1.0)
    made.review([0.1] * 31 + [30.0], 1e-5)
    assert made.interval("gradients") == before


def test_later_parts_of_a_pass_belong_to_it() -> None:
    made = budget(gradients=1e-3)
    made.add("gradients", 2e-3)
    made.add("gradients", 3e-3, more=True)
    assert made.shares["gradients"].costs[-1] == pytest.approx(5e-3)


def test_what_is_not_on_the_budget_is_done_at_each_step() -> None:
    assert budget().interval("mine") == 1
    budget().add("mine", 1.0)  # and its cost is nobody's


@given(
    share=st.floats(1e-4, 1.0),
    step_s=st.floats(1e-4, 10.0),
    base_s=st.floats(0.0, 1e-3),
    costs=st.lists(st.floats(1e-7, 0.1), min_size=3, max_size=3),
)
def test_the_intervals_keep_the_budget(
    share: float, step_s: float, base_s: float, costs: list[float]
) -> None:
    made = budget(share, **dict(zip(WEIGHTS, costs, strict=True)))
    for _ in range(3):
        made.review([step_s] * 32, base_s)
    allowed = max(share * step_s, MIN_S)
    if made.looks_every > 1:
        base_s *= UNMEASURED / made.looks_every
    left = max(allowed - base_s, 0.1 * allowed)
    for name, entry in made.shares.items():
        assert entry.interval >= WEIGHTS[name][0]
        assert entry.interval in LADDER
    capped = any(entry.interval == LADDER[-1] for entry in made.shares.values())
    assert capped or cost_a_step(made) <= left * (1 + 1e-9)
