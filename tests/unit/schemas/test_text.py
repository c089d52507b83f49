"""How people are told of numbers and of text that comes from a run."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.records.issues import issue
from tocsin.schemas.records.issues import Fact, Subject
from tocsin.schemas.text import (
    fact_text,
    number_text,
    plain_line,
    share_text,
    still,
    unit_suffix,
    where_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1769472.0, "1,769,472"),
        (0.00125, "0.00125"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        (-3.0, "-3"),
        (1e30, "1e+30"),
        (12345.678, "12,345.7"),
    ],
)
def test_numbers_are_written_as_people_read_them(value: float, text: str) -> None:
    assert number_text(value) == text


def test_units_follow_their_numbers() -> None:
    assert [unit_suffix(unit) for unit in (None, "percent", "bytes")] == ["", " %", " bytes"]
    fact = Fact(name="dead_units", value=55.0, limit=50.0, unit="percent")
    assert fact_text(fact) == "dead units 55 % (limit 50 %)"


def test_shares_have_no_exponent_and_inputs_are_named_once() -> None:
    assert [share_text(p) for p in (0.0123, 4.24, 10.0, 100.0)] == ["0.012", "4.2", "10", "100"]
    for name, where in (("input of 0", "input of 0, step 3"), ("x", "input x, step 3")):
        subject = Subject(kind="tensor", name=name, collection="inputs")
        assert where_text(issue().model_copy(update={"subject": subject})) == where


def test_a_line_is_plain() -> None:
    assert plain_line(" a\x1b[2Jb\n\tc\u202e\u200bd ") == "a [2Jb c d"
    assert plain_line("[red]naïve[/] 日本") == "[red]naïve[/] 日本"
    assert still("a   \x9b\x07b") == "a     b"


@given(st.text())
def test_no_text_steers_a_terminal(text: str) -> None:
    for safe in (plain_line(text), still(text)):
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in safe)
    assert len(still(text)) == len(text)
    assert plain_line(plain_line(text)) == plain_line(text)
