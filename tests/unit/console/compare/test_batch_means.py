"""The test on batch means: how often it is wrong, and what it finds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tocsin.console.compare.batch_means import (
    ALPHA,
    Floats,
    batch_centres,
    change_of,
    independent_values,
    t_quantile,
)

STEP_S = 0.05


def step_times(
    rng: np.random.Generator, count: int, likeness: float = 0.0, slow: float = 0.0
) -> Floats:
    """Times that spread by a tenth, each as like the one before as told; a share is ten times as
    long."""
    noise = rng.standard_normal(count)
    values = np.empty(count)
    values[0] = noise[0]
    for i in range(1, count):
        values[i] = likeness * values[i - 1] + math.sqrt(1 - likeness**2) * noise[i]
    found: Floats = STEP_S * np.exp(0.1 * values)
    return np.where(rng.random(count) < slow, 10 * found, found)


@pytest.mark.parametrize(("count", "likeness"), [(60, 0), (300, 0.5), (600, 0.9)])
def test_two_samples_of_one_distribution_differ_by_chance_as_rarely_as_declared(
    count: int, likeness: float
) -> None:
    rng = np.random.default_rng(7)
    pairs = 250
    found = 0
    for _ in range(pairs):
        first, second = (step_times(rng, count, likeness, slow=0.02) for _ in range(2))
        change = change_of(first, second)
        found += change is not None and change.low > 0
        found += change is not None and change.high < 0
    # Both directions of each pair; three standard deviations of a binomial number above it.
    expected = 2 * pairs * ALPHA
    assert found <= expected + 3 * math.sqrt(expected)


@pytest.mark.parametrize("likeness", [0, 0.5, 0.8])
def test_a_planted_tenth_is_found(likeness: float) -> None:
    rng = np.random.default_rng(11)
    found = 0
    for _ in range(20):
        first = step_times(rng, 1_500, likeness, slow=0.02)
        second = 1.1 * step_times(rng, 1_500, likeness, slow=0.02)
        change = change_of(first, second)
        assert change is not None
        assert change.low < 0.1 < change.high or abs(change.change - 0.1) < 0.05
        found += change.low > 0
    assert found >= 19


def test_a_test_that_takes_steps_for_independent_would_be_wrong() -> None:
    """The reason of the batches: the same pairs by the usual t-test."""
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(100):
        x, y = (np.log(step_times(rng, 600, 0.9)) for _ in range(2))
        error = math.sqrt(x.var(ddof=1) / x.size + y.var(ddof=1) / y.size)
        wrong += abs(y.mean() - x.mean()) > t_quantile(1 - ALPHA, 1_000) * error
    assert wrong > 30


def test_equal_series_do_not_differ() -> None:
    values = np.full(100, 0.1)
    change = change_of(values, values)
    assert change is not None
    assert (change.change, change.low, change.high) == (0, 0, 0)
    assert not change.certain


def test_the_answer_is_the_same_each_time() -> None:
    rng = np.random.default_rng(3)
    first, second = step_times(rng, 200), step_times(rng, 200)
    assert change_of(first, second) == change_of(first, second)


def test_few_values_decide_nothing() -> None:
    assert change_of(np.ones(39), np.ones(100)) is None
    assert change_of(np.full(100, np.nan), np.ones(100)) is None


def test_values_that_are_much_alike_decide_nothing() -> None:
    ramp = np.linspace(1, 2, 200)
    assert independent_values(ramp) < 4
    assert change_of(ramp, 2 * ramp) is None


def test_negative_values_have_a_difference_and_no_ratio() -> None:
    rng = np.random.default_rng(5)
    first, second = rng.standard_normal(400), rng.standard_normal(400) + 3
    change = change_of(first, second)
    assert change is not None
    assert not change.relative
    assert change.change == pytest.approx(3, abs=0.3)
    assert change.certain


def test_the_95th_percentile_sees_what_the_median_does_not() -> None:
    rng = np.random.default_rng(9)
    first, second = step_times(rng, 4_000), step_times(rng, 4_000, slow=0.1)
    median, high = (change_of(first, second, centre=c) for c in ("median", "p95"))
    assert median is not None
    assert high is not None
    assert median.change < 0.05
    assert high.low > 1


def test_batches_grow_until_neighbours_are_independent() -> None:
    rng = np.random.default_rng(13)
    assert batch_centres(step_times(rng, 2_000), "median").size == 32
    assert batch_centres(step_times(rng, 2_000, 0.99), "median").size < 32


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 31.82), (2, 6.965), (5, 3.365), (7, 2.998), (20, 2.528), (60, 2.390)],
)
def test_the_quantiles_are_those_of_the_tables(freedom: float, expected: float) -> None:
    assert t_quantile(0.99, freedom) == pytest.approx(expected, rel=0.006)
