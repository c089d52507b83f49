from __future__ import annotations

from tocsin.bus.port import Partition, Record
from tocsin.runtime.dead_letters import DeadLetterGuard, DeadLetterLimits, dead_letter
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.topics import MAX_RECORD_BYTES

LIMITS = DeadLetterLimits(consecutive=10, share=0.1, window_ms=300_000, at_least=100)


def letter_of(value: bytes) -> tuple[DeadLetter, bytes | None]:
    record = Record(Partition("t", 3), 7, 0, b"run-1", value, (("tocsin-type", b"steps"),))
    out = dead_letter(
        record,
        MalformedRecord("no header"),
        topic="dlq",
        service="rules",
        software="tocsin 1",
        now_ms=5,
    )
    assert out.headers[-1] == ("tocsin-type", b"steps")
    return DeadLetter.read(out.headers), out.value


def test_a_dead_letter_keeps_the_bytes_and_says_why() -> None:
    why, value = letter_of(b"\x00\xff")
    assert value == b"\x00\xff"
    assert (why.topic, why.partition, why.offset) == ("t", 3, 7)
    assert (why.error, why.message, why.service) == ("MalformedRecord", "no header", "rules")


def test_only_a_value_that_does_not_fit_is_left_out_and_that_is_said() -> None:
    why, value = letter_of(b"x" * (MAX_RECORD_BYTES - 200))
    assert value == b""
    assert "left out" in why.message


def test_bad_records_in_a_row_stop_the_service() -> None:
    guard = DeadLetterGuard(LIMITS)
    assert guard.count(good=0, bad=6, last_bad=6, now_ms=0) is None
    assert guard.count(good=0, bad=4, last_bad=4, now_ms=1) == (
        "10 records in a row cannot be read"
    )


def test_a_good_record_in_between_begins_the_row_again() -> None:
    guard = DeadLetterGuard(LIMITS)
    for i in range(8):
        assert guard.count(good=100, bad=6, last_bad=6, now_ms=i) is None
    assert guard.count(good=0, bad=3, last_bad=3, now_ms=9) is None
    assert guard.count(good=0, bad=1, last_bad=1, now_ms=10) is not None


def test_a_share_of_the_last_minutes_stops_the_service() -> None:
    guard = DeadLetterGuard(LIMITS)
    assert guard.count(good=40, bad=9, last_bad=1, now_ms=0) is None, "too few to say"
    why = guard.count(good=45, bad=9, last_bad=1, now_ms=1000)
    assert why == "18 of 103 records of the last 5 minutes cannot be read"


def test_what_is_older_than_the_window_does_not_count() -> None:
    guard = DeadLetterGuard(LIMITS)
    assert guard.count(good=40, bad=9, last_bad=1, now_ms=0) is None
    assert guard.count(good=95, bad=9, last_bad=1, now_ms=300_001) is None
