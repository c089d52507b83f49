"""Decisions of people as an action worker reads them."""

from __future__ import annotations

import pytest

from support.records.issues import NOW_MS
from support.records.signed import signed_record
from tocsin.actions.delivery.control_records import ControlRecords
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.signing import SigningKey, TrustedKeys


def test_the_log_says_whose_decision_it_ignored_and_why(caplog: pytest.LogCaptureFixture) -> None:
    page, known = SigningKey.generate(), ControlRecords(lambda: TrustedKeys(()))
    silence = SilenceSet(
        silence_id="made",
        match={"run": ("gpt-*",)},
        from_ms=NOW_MS,
        until_ms=NOW_MS + 60_000,
        by="ana",
        set_ms=NOW_MS,
    )

    known.follow(signed_record(silence, silence.key.encode(), page))

    assert list(known.silences) == []
    assert caplog.messages == [
        f"decision ignored ({silence.key}): key {page.public.key_id} is not trusted here"
    ]
