"""Whatever bytes come, they are a record or one of two typed errors, soon and cheaply."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.schemas.errors import MalformedRecord, RecordError, UnknownRecord
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.events import EVENT_TYPES, Event
from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    RecordOrigin,
    StepFrame,
    SystemFrame,
    TensorFrame,
)
from tocsin.schemas.records.issues import Evidence, IssueFiring, Series, Subject
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import Meta, decode, meta_of, read_meta, read_signature


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    value = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(value)))
        match draw(st.sampled_from(["set", "cut", "delete", "insert", "repeat"])):
            case "set" if at < len(value):
                value[at] = draw(st.integers(0, 255))
            case "cut":
                del value[at:]
            case "delete":
                del value[at : at + draw(st.integers(1, 16))]
            case "insert":
                value[at:at] = draw(
                    st.binary(min_size=1, max_size=8)
                    | st.sampled_from([b"9" * 30, b"-", b"NaN", b"1e999", b'\\ud800"', b"[" * 300])
                )
            case "repeat":
                value += value[at : at + 64]
    return bytes(value)


ORIGIN = RecordOrigin(run_id="gpt-1", incarnation="i-1", rank=1, world_size=2)
TENSORS = TensorFrame(
    origin=ORIGIN,
    step=3,
    collection="gradients",
    rows=("a.weight", "b.bias"),
    columns=STATISTIC_COLUMNS,
    values=np.zeros((2, 7), np.float32),
    count_columns=COUNT_COLUMNS,
    counts=np.ones((2, 4), np.uint64),
)
STEPS = StepFrame(
    origin=ORIGIN,
    steps=np.arange(3, dtype=np.uint64),
    at_us=np.arange(3, dtype=np.uint64),
    columns=("loss", "lr.0"),
    values=np.zeros((3, 2), np.float32),
)
SYSTEM = SystemFrame(
    origin=ORIGIN,
    node="n",
    at_us=np.arange(1, dtype=np.uint64),
    columns=("cpu.percent",),
    values=np.zeros((1, 1)),
)
SNAPSHOT = Snapshot(
    run_id="gpt-1",
    incarnation="i-1",
    rule="nonfinite",
    rule_version=1,
    next_offset=5,
    payload=b"state",
)
ISSUE = Event.wrap(
    IssueFiring(
        run_id="gpt-1",
        incarnation="i-1",
        issue_id="x",
        rule="r",
        use="r",
        rule_version=1,
        severity="critical",
        subject=Subject(kind="loss", name="loss"),
        reason="NaN",
        evidence=Evidence(series=Series(name="loss", steps=(1,), values=(math.nan,))),
    ),
    id="x/firing/0",
    source="/runs/gpt-1/rules",
    time_ms=1795258012250,
)
VALID = {
    value.type: (meta_of(value), value.encode())
    for value in (TENSORS, STEPS, SYSTEM, SNAPSHOT, ISSUE)
}


@pytest.mark.parametrize("name", sorted(VALID))
@settings(max_examples=100, deadline=1000)
@given(data=st.data())
def test_mutated_bytes_give_a_record_or_the_typed_error(name: str, data: st.DataObject) -> None:
    meta, valid = VALID[name]
    value = data.draw(mutated(valid))

    with suppress(MalformedRecord, UnknownRecord):
        decode(meta, value).encode()


@pytest.mark.parametrize("name", sorted(VALID))
def test_each_truncation_gives_the_typed_error(name: str) -> None:
    meta, valid = VALID[name]
    end = len(valid) - (len(SNAPSHOT.payload) if name == "snapshot" else 0)

    for stop in range(end):
        with pytest.raises(MalformedRecord):
            decode(meta, valid[:stop])


@given(st.binary(max_size=200), st.sampled_from([*sorted(VALID), "tocsin.run.started", "unknown"]))
def test_any_bytes_give_the_typed_error(value: bytes, name: str) -> None:
    with pytest.raises(RecordError):
        decode(Meta(name), value)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "tocsin-type",
                    "tocsin-version",
                    "tocsin-rank",
                    "tocsin-seq",
                    "tocsin-boot",
                    "tocsin-key-id",
                    "tocsin-signature",
                    "tocsin-dlq-topic",
                    "tocsin-dlq-offset",
                ]
            ),
            st.binary(max_size=30)
            | st.sampled_from([b"9" * 19, b"9" * 5000, b"-1", b"\xb2", b"1_0"]),
        )
    ).map(tuple)
)
def test_any_headers_give_the_typed_error(headers: tuple[tuple[str, bytes], ...]) -> None:
    for reader in (read_meta, DeadLetter.read):
        with suppress(MalformedRecord):
            reader(headers)
    read_signature(headers)


def frame(header: dict[str, Any] | bytes, blocks: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    padding = bytes(-(4 + len(text)) % 8)
    return struct.pack("<I", len(text)) + text + padding + blocks


def tensors(**changes: Any) -> dict[str, Any]:
    (length,) = struct.unpack_from("<I", VALID["tensors"][1])
    return {**json.loads(VALID["tensors"][1][4 : 4 + length]), **changes}


def shaped(*shape: int) -> list[dict[str, Any]]:
    return [{"name": "values", "dtype": "<f4", "shape": list(shape)}]


def beyond_int64(place: int) -> bytes:
    """The steps with another last number in their steps (0) or their times (1)."""
    good, bad = struct.pack("<3Q", 0, 1, 2), struct.pack("<3Q", 0, 1, 2**63)
    parts = VALID["steps"][1].split(good)
    assert len(parts) == 3
    return parts[0] + (bad, good)[place] + parts[1] + (good, bad)[place] + parts[2]


def started_with(text: bytes) -> bytes:
    return (
        b'{"specversion":"1.0","id":"a","source":"/r","type":"tocsin.run.started",'
        b'"time":"2026-11-21T14:00:00Z","data":{"run_id":"r","incarnation":"i","job_id":"j",'
        + text
        + b"}}"
    )


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "shape 2^31 x 2^31": ("tensors", lambda: frame(tensors(arrays=shaped(2**31, 2**31)))),
    "shape 2^20 x 2^20": ("tensors", lambda: frame(tensors(arrays=shaped(2**20, 2**20)))),
    "negative shape": ("tensors", lambda: frame(tensors(arrays=shaped(-1, 4)))),
    "three dimensions": ("tensors", lambda: frame(tensors(arrays=shaped(1, 1, 1)))),
    "shape beyond int64": ("tensors", lambda: frame(tensors(arrays=shaped(10**4000)))),
    "one array twice": ("tensors", lambda: frame(tensors(arrays=shaped(0, 0) * 2))),
    "an array too few": ("tensors", lambda: frame(tensors(arrays=shaped(0, 0)))),
    "other dtype": (
        "tensors",
        lambda: frame(tensors(arrays=[{"name": "values", "dtype": "|O", "shape": [1]}])),
    ),
    "header length 2^32-1": ("tensors", lambda: b"\xff\xff\xff\xff" + bytes(100)),
    "a column twice": ("tensors", lambda: frame(tensors(columns=["min", "min"]))),
    "part 3 of 3": ("tensors", lambda: frame(tensors(part=3, parts=3))),
    "step beyond int64": ("tensors", lambda: frame(tensors(step=2**63))),
    "a step of a row beyond int64": ("steps", lambda: beyond_int64(0)),
    "a time of a row beyond int64": ("steps", lambda: beyond_int64(1)),
    "run id that leaves its folder": ("tensors", lambda: frame(tensors(run_id="../../etc"))),
    "2 MB of numbers as names": ("tensors", lambda: frame(tensors(rows=[1] * 400_000))),
    "2 MB of empty arrays": ("tensors", lambda: frame(tensors(arrays=[{}] * 300_000))),
    "deep header": ("tensors", lambda: frame(b"[" * 1_000_000)),
    "huge integer": ("tensors", lambda: frame(b'{"step":' + b"9" * 1_000_000 + b"}")),
    "header that is not UTF-8": ("tensors", lambda: frame(b'{"run_id":"\xff\xfe"}')),
    "snapshot header deep": ("snapshot", lambda: frame(b'{"a":' * 500_000)),
    "deep data": ("tocsin.run.started", lambda: started_with(b'"x":' + b"[" * 1_000_000)),
    "deep objects": ("tocsin.run.started", lambda: started_with(b'"x":' + b'{"a":' * 300_000)),
    "lone surrogate": ("tocsin.run.started", lambda: started_with(b'"node":"\\ud800"')),
    "not UTF-8": ("tocsin.run.started", lambda: started_with(b'"node":"\xff"')),
    "integer of a million digits": (
        "tocsin.run.started",
        lambda: started_with(b'"pid":' + b"9" * 1_000_000),
    ),
    "integer beyond int64": ("tocsin.run.started", lambda: started_with(b'"pid":9' + b"0" * 19)),
    "NaN in a plain float": ("tocsin.run.started", lambda: started_with(b'"heartbeat_s":NaN')),
    "infinite plain float": ("tocsin.run.started", lambda: started_with(b'"heartbeat_s":1e999')),
    "null where NaN was": (
        "tocsin.issue.firing",
        lambda: ISSUE.encode().replace(b'["NaN"]', b"[null]"),
    ),
    "100,000 labels": (
        "tocsin.run.started",
        lambda: started_with(
            b'"labels":{' + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}"
        ),
    ),
    "200,000 bad groups": (
        "tocsin.run.started",
        lambda: started_with(b'"groups":[' + b",".join([b"1"] * 200_000) + b"]"),
    ),
    "text over the limit": (
        "tocsin.run.started",
        lambda: started_with(b'"command":"' + b"x" * 5000 + b'"'),
    ),
    "time without a zone": (
        "tocsin.run.started",
        lambda: started_with(b'"pid":1').replace(b"14:00:00Z", b"14:00:00"),
    ),
    "another type than the header": ("tocsin.run.ended", lambda: started_with(b'"pid":1')),
    "an unknown type": (
        "tocsin.run.begun",
        lambda: started_with(b'"pid":1').replace(b"run.started", b"run.begun"),
    ),
    "no data": ("tocsin.run.started", lambda: b'{"specversion":"1.0"}'),
    "a number": ("tocsin.run.started", lambda: b"1"),
    "nothing": ("tocsin.run.started", lambda: b""),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_bytes_are_refused_quickly_and_cheaply(name: str) -> None:
    record_type, make = HOSTILE[name]
    value = make()
    tracemalloc.start()
    began = time.perf_counter()

    with pytest.raises(RecordError) as raised:
        decode(Meta(record_type), value)

    seconds, peak_bytes = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(raised.value, MalformedRecord | UnknownRecord)
    assert len(str(raised.value)) < 2000
    assert seconds < 2
    # What is refused may be read first: 2 MB of JSON are at most some 60 MB of objects.
    assert peak_bytes < 64e6


def test_another_major_version_is_unknown() -> None:
    with pytest.raises(UnknownRecord, match="version 2"):
        decode(Meta("tensors", version=2), VALID["tensors"][1])


def test_a_field_of_a_later_release_is_ignored() -> None:
    event = EVENT_TYPES.decode(started_with(b'"invented_later":[1,{"a":null}]'))

    assert isinstance(event.data, RunStarted)
    assert b"invented" not in event.encode()


def test_an_array_that_does_not_fit_is_the_callers_bug() -> None:
    with pytest.raises(ValueError, match="values"):
        TensorFrame(
            origin=ORIGIN,
            step=0,
            collection="weights",
            rows=("a",),
            columns=("min",),
            values=np.zeros((2, 1), np.float32),
            count_columns=(),
            counts=np.zeros((1, 0), np.uint64),
        ).encode()
