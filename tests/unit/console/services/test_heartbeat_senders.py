"""Who has gone silent, in virtual time."""

from __future__ import annotations

import pytest

from tocsin.console.services.heartbeat_senders import MAX_SENDERS, Change, Senders, TooManySenders

AFTER = 120_000


def looked(senders: Senders, start_ms: int, end_ms: int) -> list[Change]:
    """What is found by looking each second, after `start_ms` and up to `end_ms`."""
    return [
        change
        for now_ms in range(start_ms + 1000, end_ms + 1, 1000)
        for change in senders.check(now_ms)
    ]


def test_a_sender_that_stops_is_reported_once_and_once_more_when_it_is_back() -> None:
    senders = Senders(after_ms=AFTER, now_ms=0)
    for now_ms in (0, 60_000):
        assert senders.pinged("rules@a", now_ms) is None
    assert senders.pinged("rules@b", 60_000) is None
    assert looked(senders, 0, 120_000) == []
    assert senders.pinged("rules@b", 120_000) is None

    (silent,) = looked(senders, 120_000, 200_000)
    assert (silent.sender, silent.state, silent.since_ms) == ("rules@a", "silent", 60_000)
    assert silent.reason == "no heartbeat for 121 s: rules@a is dead, hangs, or is cut off"
    senders.pinged("rules@b", 200_000)
    assert looked(senders, 200_000, 300_000) == []

    back = senders.pinged("rules@a", 300_000)
    assert back == Change("rules@a", "back", 60_000, "rules@a pings again, after 240 s")
    assert senders.pinged("rules@a", 310_000) is None
    senders.pinged("rules@b", 310_000)
    assert [one.sender for one in looked(senders, 300_000, 500_000)] == ["rules@a", "rules@b"]


def test_one_that_reports_its_end_is_forgotten_unless_it_is_expected() -> None:
    senders = Senders(after_ms=AFTER, expect=["actions@a"], now_ms=0)
    for name in ("run@r1", "actions@a"):
        senders.pinged(name, 1000)
        senders.pinged(name, 2000, ending=True)
    senders.pinged("run@r2", 2000, ending=True)

    assert [one.sender for one in looked(senders, 0, 400_000)] == ["actions@a"]


def test_an_expected_sender_that_never_pinged_is_reported() -> None:
    senders = Senders(after_ms=AFTER, expect=["rules@a"], now_ms=5000)
    (silent,) = looked(senders, 5000, 200_000)
    assert silent.reason.startswith("no heartbeat yet, waited 121 s: rules@a ")


def test_nobody_is_reported_for_a_time_in_which_nobody_could_be_heard() -> None:
    senders = Senders(after_ms=AFTER, now_ms=0)
    senders.pinged("rules@a", 0)
    senders.pinged("rules@b", 0)
    assert looked(senders, 0, 30_000) == []

    assert senders.check(1_000_000) == []
    senders.pinged("rules@b", 1_030_000)

    (silent,) = looked(senders, 1_000_000, 1_120_000)
    assert silent.sender == "rules@a"


def test_names_that_change_at_each_start_fill_no_memory() -> None:
    senders = Senders(after_ms=AFTER, now_ms=0)
    for number in range(MAX_SENDERS):
        senders.pinged(f"s{number}", 0)
    with pytest.raises(TooManySenders, match="1,000 senders"):
        senders.pinged("one-more", 0)
    assert senders.pinged("s1", 0) is None
