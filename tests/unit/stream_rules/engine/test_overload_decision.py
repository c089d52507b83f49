"""Which run gives way when a worker cannot keep up, and why."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.schemas.records.collections import Tier
from tocsin.stream_rules.engine.overload_decision import (
    Decision,
    Fairness,
    FairnessPolicy,
    Load,
    RunKey,
    decide,
)

POLICY = FairnessPolicy()
HUGE, SMALL = (3, "huge"), (3, "small")
LAGGING = Load(
    took_ms=10_000, lag_ms=45_000, lag_before_ms=44_000, spent_s={HUGE: 9.0, SMALL: 0.5}, runs=2
)


def decided(load: Load, shed: Mapping[RunKey, Set[Tier]] | None = None) -> Decision:
    return decide(load, shed or {}, POLICY)


def test_the_run_that_takes_most_of_the_time_gives_way_tier_by_tier() -> None:
    first = decided(LAGGING)
    assert (first.action, first.run, first.tier) == ("shed", HUGE, 2)
    assert first.why == (
        "the worker was 45 s behind, and this run used 95% of the time of its rules, "
        "which 2 runs share"
    )
    second = decided(LAGGING, {HUGE: {2}})
    assert (second.action, second.run, second.tier) == ("shed", HUGE, 1)
    third = decided(LAGGING, {HUGE: {1, 2}})
    assert (third.action, third.run) == ("postpone", HUGE)
    assert third.why == first.why


def test_a_window_measures_the_largest_share() -> None:
    fairness = Fairness()
    fairness.round(0, None)
    for run, seconds in ((HUGE, 3.0), (SMALL, 1.0)):
        fairness.spent(run, seconds)
    assert fairness.round(POLICY.window_ms, 45_000)
    fairness.close(POLICY.window_ms, runs=2, shed={})
    assert fairness.largest_share == 0.75
    fairness.close(2 * POLICY.window_ms, runs=2, shed={})
    assert fairness.largest_share == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lag_ms": 30_000}, "no lag"),
        ({"lag_before_ms": None}, "45 s behind, and catching up or just started"),
        ({"lag_before_ms": 50_000}, "45 s behind, and catching up or just started"),
        # A worker that had no lag was given a partition of one that has died.
        ({"lag_before_ms": 1_000}, "45 s behind, and catching up or just started"),
        ({"spent_s": {HUGE: 3.0, SMALL: 0.5}}, "45 s behind, but not because of the rules"),
        ({"spent_s": {}}, "45 s behind, but not because of the rules"),
        ({"runs": 1}, "no other run waits"),
        ({"spent_s": {HUGE: 5.0, SMALL: 4.0}}, "no run uses more than its share"),
        (
            {"spent_s": {(1, f"run-{n}"): 0.1 for n in range(99)}, "runs": 99},
            "no run uses more than its share",
        ),
    ],
)
def test_else_all_stays_as_it_is(change: dict[str, object], why: str) -> None:
    decision = decided(replace(LAGGING, **change))  # type: ignore[arg-type]
    assert (decision.action, decision.run) == ("keep", None)
    assert decision.why.startswith(why)


def test_among_many_runs_one_far_over_its_share_gives_way() -> None:
    spent = {(1, f"run-{n}"): 0.1 for n in range(60)} | {HUGE: 3.0}
    assert decided(replace(LAGGING, spent_s=spent, runs=61)).run == HUGE


def test_what_was_left_out_comes_back_in_the_other_order_after_some_calm() -> None:
    calm = replace(LAGGING, lag_ms=1_000, calm=POLICY.calm_windows)
    back = decided(calm, {HUGE: {1, 2}})
    assert (back.action, back.run, back.tier) == ("judge", HUGE, 1)
    assert decided(calm, {HUGE: {2}}).tier == 2
    assert decided(calm, {HUGE: set()}).action == "keep"
    assert decided(replace(calm, calm=POLICY.calm_windows - 1), {HUGE: {2}}).action == "keep"


@given(
    st.dictionaries(st.tuples(st.just(0), st.sampled_from("abcd")), st.floats(0, 20), min_size=1),
    st.integers(0, 200_000),
    st.integers(0, 200_000),
    st.integers(0, 30),
    st.sets(st.sampled_from([1, 2])),
)
def test_tier_0_is_never_left_out_and_no_small_run_gives_way(
    spent: dict[RunKey, float], lag_ms: int, before_ms: int, more: int, tiers: set[Tier]
) -> None:
    load = Load(10_000, lag_ms, before_ms, spent, len(spent) + more)
    decision = decided(load, dict.fromkeys(spent, tiers))
    if decision.action == "shed":
        assert decision.tier in {1, 2} - tiers
        assert decision.run is not None
        assert spent[decision.run] == max(spent.values())
        assert spent[decision.run] > POLICY.least_share * sum(spent.values())
        assert lag_ms > POLICY.lag_ms


def test_a_window_is_measured_from_the_records_that_were_read_in_it() -> None:
    fairness = Fairness()

    def window(start_ms: int, lags: list[int | None]) -> Decision:
        over = [fairness.round(start_ms + 2_500 * n, lag) for n, lag in enumerate(lags, 1)]
        assert over == [False, False, False, True]
        fairness.spent(HUGE, 8.0)
        fairness.spent(SMALL, 0.1)
        return fairness.close(start_ms + 10_000, runs=2, shed={})

    assert not fairness.round(0, None)
    assert window(0, [40_000, None, 41_000, 42_000]).action == "keep", "it may be catching up"
    assert window(10_000, [45_000, 29_000, 46_000, 47_000]).why == "no lag"
    assert window(20_000, [45_000, None, 46_000, 47_000]).action == "shed"
    fairness.release({3})
    assert not fairness.round(30_500, 50_000)
    assert fairness.round(40_500, 50_000)
    assert fairness.close(40_500, runs=2, shed={}).action == "keep", "nothing was spent"
