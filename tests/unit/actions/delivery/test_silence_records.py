"""Silences as the control topic has them."""

from __future__ import annotations

from support.records.issues import NOW_MS
from support.records.signed import signed_record
from tocsin.actions.delivery.silence_records import SilenceRecords
from tocsin.bus.port import Record
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.signing import SigningKey, TrustedKeys

KEY = SigningKey.generate()


def silence(until_ms: int, set_ms: int) -> Record:
    """A record of one and the same silence."""
    data = SilenceSet(
        silence_id="made",
        match={"run": ("gpt-*",)},
        from_ms=NOW_MS,
        until_ms=until_ms,
        by="ana",
        set_ms=set_ms,
    )
    return signed_record(data, data.key.encode(), KEY)


def test_a_silence_that_was_ended_is_not_set_again_by_its_first_record() -> None:
    known = SilenceRecords(lambda: TrustedKeys([KEY.public]))
    first, ended = silence(NOW_MS + 60_000, NOW_MS), silence(NOW_MS + 5, NOW_MS + 5)

    for record in (first, ended, first):
        known.follow(record)

    assert [one.until_ms for one in known] == [NOW_MS + 5]
