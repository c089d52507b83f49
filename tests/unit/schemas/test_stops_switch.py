"""The switch for all stops: signed, and never set back by an older record."""

from __future__ import annotations

import pytest

from support.records.signed import signed_record, switch_record
from tocsin.schemas.errors import MalformedRecord, SignatureError
from tocsin.schemas.records.stops.control import SWITCH_KEY, StopAnswered
from tocsin.schemas.signing import SigningKey, TrustedKeys
from tocsin.schemas.stops_switch import StopsSwitch

KEY = SigningKey.generate()


def trusted() -> TrustedKeys:
    return TrustedKeys([KEY.public])


def test_it_switches_off_and_on() -> None:
    switch = StopsSwitch()
    assert switch.off == ""

    assert switch.apply(switch_record(KEY, at_ms=1), trusted)
    assert switch.off == "all stops are switched off by ana: a wrong rule"
    assert switch.apply(switch_record(KEY, off=False, at_ms=2), trusted)
    assert switch.off == ""


def test_an_older_record_changes_nothing() -> None:
    switch = StopsSwitch()
    assert switch.apply(switch_record(KEY, off=True, at_ms=5), trusted)

    assert not switch.apply(switch_record(KEY, off=False, at_ms=4), trusted)

    assert switch.off


def test_only_signed_records_count() -> None:
    switch = StopsSwitch()
    for key in (None, SigningKey.generate()):
        with pytest.raises(SignatureError):
            switch.apply(switch_record(key), trusted)
    other = StopAnswered(
        run_id="r", incarnation="i", delivery_id="d", verdict="approve", by="ana", at_ms=1
    )
    with pytest.raises(MalformedRecord, match=r"expected tocsin\.stops\.switched"):
        switch.apply(signed_record(other, SWITCH_KEY.encode(), KEY), trusted)
    assert not switch.apply(signed_record(other, other.key.encode(), KEY), trusted)
    assert switch.off == ""
