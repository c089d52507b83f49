"""A rule's memory as bytes, and back, to the last bit."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tocsin.schemas.errors import MalformedRecord
from tocsin.stream_rules.reading.state_codec import StateArray, dump_state, load_state


class Model(BaseModel):
    """What a custom rule may keep, too."""

    worst: float = -math.inf


@dataclass
class Inner:
    highest: float = -math.inf
    seen: dict[int, float] = field(default_factory=dict)


@dataclass
class Outer:
    lowest: float = math.inf
    last: float | None = None
    inner: Inner = field(default_factory=Inner)
    by_name: dict[str, Inner] = field(default_factory=dict)
    model: Model = field(default_factory=Model)
    rows: StateArray = field(default_factory=lambda: np.zeros(2))


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers())
def test_each_float_comes_back_bit_for_bit(value: float, key: int) -> None:
    value = math.nan if math.isnan(value) else value  # JSON has one NaN
    state = Outer(value, value, Inner(value, {key: value}), {"a": Inner(value)}, Model(worst=value))
    state.rows = np.array([[value], [0.5]])

    again = load_state(Outer, dump_state(state))

    found = (
        again.lowest, again.last, again.inner.highest, again.inner.seen[key],
        again.by_name["a"].highest, again.model.worst, float(again.rows[0, 0]),
    )  # fmt: skip
    assert {bits(each) for each in found if each is not None} == {bits(value)}
    assert again.rows.shape == (2, 1)


def test_it_is_the_json_that_python_reads() -> None:
    written = json.loads(dump_state(Outer(last=math.nan)))
    assert math.isnan(written["last"])
    assert written["inner"] == {"highest": -math.inf, "seen": {}}
    assert written["model"] == {"worst": -math.inf}


def test_an_array_that_cannot_be_kept_is_an_error() -> None:
    with pytest.raises(ValueError, match="an array of complex128 cannot be part"):
        dump_state(Outer(rows=np.zeros(2, dtype=complex)))


@pytest.mark.parametrize("payload", [b"", b"{", b'{"lowest": "x"}', b'{"inner": ' + b"[" * 999])
def test_what_is_no_state_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedRecord, match="state of a rule"):
        load_state(Outer, payload)
