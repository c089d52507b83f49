from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.actions.decision.retry import (
    Decision,
    Outcome,
    RetryPolicy,
    backoff_ms,
    decide,
    retry_after_ms,
)

POLICY = RetryPolicy()
NOW_MS = 1_795_258_012_300
GIVE_UP_MS = NOW_MS + 24 * 3_600_000


def after(outcome: Outcome, *, attempts: int = 1, now_ms: int = NOW_MS) -> Decision:
    return decide(
        outcome,
        delivery_id="d-1",
        attempts=attempts,
        now_ms=now_ms,
        give_up_ms=GIVE_UP_MS,
        policy=POLICY,
    )


def test_what_we_refuse_ourselves_is_final() -> None:
    decision = after(Outcome(forbidden="address 10.0.0.1 is not public"))
    assert decision == Decision("rejected", "address 10.0.0.1 is not public")


def test_the_last_attempt_is_made_when_time_is_up_and_then_it_expires() -> None:
    late = GIVE_UP_MS - 10
    decision = after(Outcome(status=503), attempts=30, now_ms=late)
    assert decision.next_attempt_ms == GIVE_UP_MS
    assert after(Outcome(status=429, retry_after="999999999"), attempts=3).next_attempt_ms == (
        GIVE_UP_MS
    )
    expired = after(Outcome(failure="timeout"), attempts=31, now_ms=GIVE_UP_MS)
    assert expired == Decision("expired", "given up after 31 attempts, the last: timeout")


def test_backoff_is_full_jitter_between_its_bounds_and_the_same_each_time() -> None:
    waits = [backoff_ms(f"d-{i}", 5, POLICY) for i in range(400)]
    assert waits == [backoff_ms(f"d-{i}", 5, POLICY) for i in range(400)]
    assert min(waits) >= POLICY.least_ms
    assert max(waits) <= 16_000
    assert 7_000 <= sum(waits) / len(waits) <= 9_000
    assert max(backoff_ms(f"d-{i}", 60, POLICY) for i in range(400)) <= 300_000


@pytest.mark.parametrize("text", ["", "-1", "soon", "1.5", "9" * 40, "Wed, 99 Xxx 2026", "²"])
def test_a_retry_after_that_says_nothing_is_ignored(text: str) -> None:
    assert retry_after_ms(text, NOW_MS) is None


@given(st.text(max_size=60))
def test_no_retry_after_raises(text: str) -> None:
    wait_ms = retry_after_ms(text, NOW_MS)
    assert wait_ms is None or wait_ms >= 0


def test_a_day_of_outage_costs_a_bounded_number_of_attempts() -> None:
    now_ms, attempts = NOW_MS, 0
    while True:
        attempts += 1
        decision = after(Outcome(status=503), attempts=attempts, now_ms=now_ms)
        if decision.next_attempt_ms is None:
            break
        now_ms = decision.next_attempt_ms
    assert decision.state == "expired"
    assert now_ms == GIVE_UP_MS
    assert 300 < attempts < 1000
