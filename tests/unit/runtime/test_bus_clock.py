"""Timers are in append time: a worker whose clock is ahead must not fire them early."""

from __future__ import annotations

from tocsin.bus.port import Partition, Record
from tocsin.runtime.bus_clock import SETTLING_MS, WINDOW_MS, BusClock
from tocsin.runtime.offsets import Positions

P0 = Partition("t", 0)
AHEAD_MS = 60_000
APPEND_MS = 1_800_000_000_000


def at(offset: int, append_ms: int) -> Record:
    return Record(P0, offset, append_ms, b"run-1", b"")


def test_a_clock_that_is_ahead_is_known_from_records_that_were_just_appended() -> None:
    clock = BusClock()
    assert clock.unknown([at(0, APPEND_MS)])
    clock.observe_ends({P0: 1}, APPEND_MS)
    assert not clock.unknown([at(0, APPEND_MS)])
    for offset in range(1, 4):
        append_ms = APPEND_MS + 10_000 * offset
        clock.observe([at(offset, append_ms)], append_ms + AHEAD_MS + 5 * offset)
    assert clock.ahead_ms(APPEND_MS) == AHEAD_MS + 5

    positions = Positions(["t"])
    positions.start(0, {"t": 4})
    now_ms = APPEND_MS + 30_000 + AHEAD_MS
    first = positions.caught_up({P0: 4}, now_ms, ahead_ms=AHEAD_MS)[0]
    assert (first.as_of_ms, first.since_ms) == (APPEND_MS + 30_000, APPEND_MS + 30_000)
    later = positions.caught_up({P0: 4}, now_ms + 500, ahead_ms=AHEAD_MS)[0]
    assert later.as_of_ms - later.since_ms == 500


def test_a_clock_that_is_behind_delays_nothing() -> None:
    clock = BusClock()
    clock.observe_ends({P0: 0}, APPEND_MS)
    clock.observe([at(0, APPEND_MS)], APPEND_MS - 5_000)
    assert clock.ahead_ms(APPEND_MS) == -5_000
    positions = Positions(["t"])
    positions.start(0, {"t": 1})
    known = positions.caught_up({P0: 1}, APPEND_MS - 5_000, ahead_ms=clock.ahead_ms(APPEND_MS))
    assert known[0].as_of_ms == APPEND_MS


def test_old_records_count_for_a_short_time_only() -> None:
    clock = BusClock()
    assert clock.ahead_ms(0) == 0
    now_ms = APPEND_MS + 3_600_000
    clock.observe([at(0, APPEND_MS - 7), at(1, APPEND_MS)], now_ms)
    assert clock.ahead_ms(now_ms) == 3_600_000
    assert clock.ahead_ms(now_ms + SETTLING_MS) == 0, "the run may be silent for ever"


def test_a_clock_that_was_set_right_is_believed_after_two_windows() -> None:
    clock = BusClock()
    clock.observe_ends({P0: 0}, APPEND_MS)
    clock.observe([at(0, APPEND_MS)], APPEND_MS + 3)
    for count in range(1, 4):
        append_ms = APPEND_MS + count * WINDOW_MS
        clock.observe([at(count, append_ms)], append_ms + AHEAD_MS)
    assert clock.ahead_ms(APPEND_MS) == AHEAD_MS


def test_nothing_is_known_before_a_record_has_come_or_could_have() -> None:
    clock = BusClock()
    assert not clock.known(APPEND_MS + SETTLING_MS), "nobody has asked for the ends yet"
    clock.observe_ends({P0: 1}, APPEND_MS)
    assert not clock.known(APPEND_MS + SETTLING_MS - 1)
    assert clock.known(APPEND_MS + SETTLING_MS), "the run may be silent for ever"
    clock.observe([at(0, APPEND_MS)], APPEND_MS + AHEAD_MS)
    assert clock.known(APPEND_MS + AHEAD_MS)
