"""`tocsin silence`: what was typed, and what is on the bus then."""

from __future__ import annotations

import pytest

from support.records.issues import NOW_MS
from tocsin.console.silences.send import (
    SilenceRequest,
    read_request,
)
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.silences import SilenceSet

HOUR_MS = 3_600_000


def request(*match: str, lasts: str | None = "2h", **more: object) -> SilenceRequest:
    given: dict[str, object] = {"until": None, "by": "ana@node", "why": "known", "mutes": []}
    given |= {"now_ms": NOW_MS}
    return read_request(match or ("run=sweep-*",), lasts=lasts, **{**given, **more})  # type: ignore[arg-type]


def test_what_was_typed_is_read() -> None:
    made = request("run=sweep-*", "rule=a", "rule=b", mutes=["stop", "stop"])
    assert made.match == {"run": ("sweep-*",), "rule": ("a", "b")}
    assert made.until_ms == NOW_MS + 2 * HOUR_MS
    assert made.mutes == ("stop",)
    assert request().mutes == ("notify",)
    until = request(lasts=None, until="2026-11-21T12:46:52.300+01:00")
    assert until.until_ms == NOW_MS + HOUR_MS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"match": ["sweep"]}, "expected KEY=PATTERN"),
        ({"match": ["run="]}, "expected KEY=PATTERN"),
        ({"match": ["9=x"]}, "expected a label's key"),
        ({"lasts": None}, "either --for, like 2h, or --until"),
        ({"until": "2026-12-01T00:00Z"}, "either --for, like 2h, or --until"),
        ({"lasts": "2"}, "--for 2: expected a duration"),
        ({"lasts": None, "until": "tomorrow"}, "--until tomorrow: expected a time with its zone"),
        ({"lasts": None, "until": "2026-01-01T00:00Z"}, "has ended before it starts"),
        ({"why": " "}, "--why: expected a few words"),
    ],
)
def test_a_mistake_is_a_sentence(given: dict[str, object], words: str) -> None:
    match = given.pop("match", ["run=x"])
    with pytest.raises(ConfigurationError, match=words):
        request(*match, **given)  # type: ignore[arg-type, misc]


def test_a_silence_is_read_back_as_it_was() -> None:
    made = SilenceSet(
        silence_id="a", match={"run": ("x",)}, from_ms=1, until_ms=2, by="b", set_ms=1
    )
    assert SilenceSet.model_validate_json(made.model_dump_json()) == made
    assert made.key == "_all/silence/a"
