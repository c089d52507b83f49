"""Whatever a record holds, it comes back from its bytes."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event, clip
from tocsin.schemas.records.fields import MAX_MILLIS
from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    Frame,
    Mode,
    RecordOrigin,
    StepFrame,
    SystemFrame,
    TensorFrame,
)
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Series, Subject
from tocsin.schemas.records.runs import Group, Heartbeat, RunStarted
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import Meta, decode, meta_of, read_meta

MAX_INT = 2**63 - 1
whole = st.integers(0, MAX_INT) | st.sampled_from([0, 1, 2**31, 2**32, 2**53 + 1, MAX_INT])
# All of Unicode but lone surrogates, control characters and quotes included.
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
millis = st.integers(0, MAX_MILLIS)
ids = st.from_regex(r"[a-f0-9-]{1,36}", fullmatch=True)
run_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,60}", fullmatch=True)
incarnations = st.from_regex(r"[a-f0-9-]{0,36}", fullmatch=True)
reals = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)
finite = st.floats(0, 1e300)
modes: st.SearchStrategy[Mode] = st.sampled_from(("train", "eval", "predict", "global"))
origins = st.builds(
    RecordOrigin,
    run_id=run_ids,
    incarnation=incarnations,
    rank=whole,
    world_size=st.integers(1, MAX_INT),
)
column_names = st.lists(words, max_size=6, unique=True).map(tuple)


def floats(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Any bits: NaNs with payloads, subnormals, both zeros."""
    integers = {"<f4": "<u4", "<f8": "<u8", "<u8": "<u8"}[dtype]
    return arrays.arrays(np.dtype(integers), shape).map(lambda bits: bits.view(dtype))


def wholes(count: int) -> st.SearchStrategy[Any]:
    """Steps, or microseconds."""
    return arrays.arrays(np.dtype("<u8"), (count,), elements=whole)


@st.composite
def tensor_frames(draw: st.DrawFn) -> TensorFrame:
    rows = draw(st.lists(words, max_size=8).map(tuple))
    columns, counts = draw(column_names), draw(column_names)
    parts = draw(st.integers(1, MAX_INT))
    return TensorFrame(
        origin=draw(origins),
        step=draw(whole),
        mode=draw(modes),
        collection=draw(words),
        every=draw(st.integers(1, MAX_INT)),
        part=draw(st.integers(0, parts - 1)),
        parts=parts,
        at_us=draw(whole),
        rows=rows,
        columns=columns,
        values=draw(floats("<f4", (len(rows), len(columns)))),
        count_columns=counts,
        counts=draw(floats("<u8", (len(rows), len(counts)))),
    )


@st.composite
def step_frames(draw: st.DrawFn) -> StepFrame:
    n, columns = draw(st.integers(0, 5)), draw(column_names)
    return StepFrame(
        origin=draw(origins),
        mode=draw(modes),
        steps=draw(wholes(n)),
        at_us=draw(wholes(n)),
        columns=columns,
        values=draw(floats("<f4", (n, len(columns)))),
    )


@st.composite
def system_frames(draw: st.DrawFn) -> SystemFrame:
    n, columns = draw(st.integers(0, 5)), draw(column_names)
    return SystemFrame(
        origin=draw(origins),
        node=draw(words),
        at_us=draw(wholes(n)),
        columns=columns,
        values=draw(floats("<f8", (n, len(columns)))),
    )


snapshots = st.builds(
    Snapshot,
    run_id=run_ids,
    incarnation=incarnations,
    rule=words,
    rule_version=whole,
    next_offset=whole,
    payload=st.binary(max_size=200),
    saved_at_ms=millis,
    software=words,
)
labels = st.dictionaries(words, words, max_size=4)
started = st.builds(
    RunStarted,
    run_id=run_ids,
    incarnation=incarnations,
    rank=whole,
    job_id=words,
    labels=labels,
    command=words,
    groups=st.lists(st.builds(Group, index=whole, parameters=whole, lr=reals), max_size=3),
    parameters=whole,
)
heartbeats = st.builds(
    Heartbeat, run_id=run_ids, incarnation=incarnations, last_step=st.none() | whole
)
series = st.lists(st.tuples(whole, reals), max_size=5).map(
    lambda points: Series(
        name="loss", steps=tuple(s for s, _ in points), values=tuple(v for _, v in points)
    )
)
issues = st.builds(
    IssueFiring,
    run_id=run_ids,
    incarnation=incarnations,
    issue_id=ids,
    rule=words,
    use=words,
    rule_version=st.integers(1, MAX_INT),
    severity=st.sampled_from(["info", "warning", "critical"]),
    subject=st.builds(Subject, kind=st.just("tensor"), name=words),
    reason=words,
    labels=labels,
    evidence=st.builds(
        Evidence,
        facts=st.lists(
            st.builds(Fact, name=words, value=reals | words, limit=st.none() | reals), max_size=3
        ),
        series=st.none() | series,
        followed=whole,
        also=st.lists(words, max_size=3),
    ),
)
events = st.builds(
    Event.wrap,
    started | heartbeats | issues,
    id=st.text("abc/0", min_size=1),
    source=st.just("/runs/x"),
    time_ms=st.integers(0, 4_102_444_800_000),
)


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def same_fields(a: Frame, b: Frame) -> bool:
    return all(
        same_bits(x, y) if isinstance(x, np.ndarray) else x == y
        for x, y in ((getattr(a, name), getattr(b, name)) for name in a.__slots__)
    )


@given(tensor_frames() | step_frames() | system_frames())
def test_a_frame_comes_back_bit_for_bit(frame: TensorFrame | StepFrame | SystemFrame) -> None:
    meta = meta_of(frame, rank=frame.origin.rank)

    back = decode(read_meta(meta.headers()), frame.encode())

    assert isinstance(back, type(frame))
    assert same_fields(back, frame)


@given(snapshots)
def test_a_snapshot_comes_back(snapshot: Snapshot) -> None:
    assert decode(meta_of(snapshot), snapshot.encode()) == snapshot


@given(events)
def test_an_event_comes_back(event: Event[Data]) -> None:
    back = decode(meta_of(event), event.encode())

    assert isinstance(back, Event)
    assert type(back.data) is type(event.data)
    assert (back.id, back.source, back.time_ms) == (event.id, event.source, event.time_ms)
    assert back.encode() == event.encode()


@given(reals)
def test_a_real_keeps_its_bits(value: float) -> None:
    fact = Fact(name="x", value=value)

    back = Fact.model_validate_json(fact.model_dump_json())

    assert isinstance(back.value, float)
    assert struct.pack("<d", back.value) == struct.pack("<d", value) or math.isnan(value)
    assert math.isnan(back.value) == math.isnan(value)


@given(
    st.builds(
        Meta,
        type=words.filter(lambda w: len(w.encode()) <= 100),
        version=whole,
        rank=whole,
        boot=words.filter(lambda w: len(w.encode()) <= 100),
        seq=whole,
    )
)
def test_headers_come_back(meta: Meta) -> None:
    assert read_meta(meta.headers()) == meta


@given(
    st.builds(
        DeadLetter,
        topic=words,
        partition=whole,
        offset=whole,
        error=words,
        message=words,
        service=words,
        software=words,
        at_ms=whole,
    )
)
def test_a_dead_letter_comes_back(letter: DeadLetter) -> None:
    assert DeadLetter.read((*letter.headers(), ("tocsin-dlq-topic", b"of the original"))) == letter


@given(st.text(max_size=30), st.integers(1, 20))
def test_clipped_text_always_encodes(text: str, limit: int) -> None:
    clipped = clip(text, limit)

    assert len(clipped) <= limit
    clipped.encode()


def test_a_path_that_is_not_utf8_is_carried_readably() -> None:
    event = Event.wrap(
        RunStarted(run_id="r", incarnation="i", job_id="j", folder="/home/\udcffana"),
        id="b/0",
        source="/runs/r",
        time_ms=0,
    )

    assert EVENT_TYPES.decode(event.encode()).data.model_dump()["folder"] == "/home/?ana"


@settings(max_examples=50)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), max_size=60),
    st.integers(2_000, 6_000),
)
def test_parts_fit_and_make_the_whole(rows: list[str], max_bytes: int) -> None:
    n = len(rows)
    whole_frame = TensorFrame(
        origin=RecordOrigin(run_id="gpt-1", incarnation="i-1"),
        step=7,
        collection="weights",
        rows=tuple(rows),
        columns=STATISTIC_COLUMNS,
        values=np.arange(7 * n, dtype=np.float32).reshape(n, 7),
        count_columns=COUNT_COLUMNS,
        counts=np.arange(4 * n, dtype=np.uint64).reshape(n, 4),
    )

    parts = [TensorFrame.decode(part.encode()) for part in whole_frame.split(max_bytes)]

    assert [(part.part, part.parts, part.step) for part in parts] == [
        (i, len(parts), 7) for i in range(len(parts))
    ]
    assert all(len(part.encode()) <= max_bytes or len(part.rows) == 1 for part in parts)
    assert tuple(name for part in parts for name in part.rows) == whole_frame.rows
    assert same_bits(np.concatenate([part.values for part in parts]), whole_frame.values)
    assert same_bits(np.concatenate([part.counts for part in parts]), whole_frame.counts)
