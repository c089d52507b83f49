"""From what was handed in to records: their order, and what becomes one frame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.emitter.send.encoding import Address, Encoder
from tocsin.emitter.send.outbox import Item, StepRow
from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.frames import RecordOrigin, StepFrame, TensorFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.reading.rank_series import RankSeries

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")
STEP = ("loss", "step_time_s", "lr.0")
EXACT = (*STEP, "gradient_norm")
COLUMNS = (STEP, EXACT, ("log.accuracy",), ("log.reward", "log.length"), ("forward_device_s",))


def encoded(items: Sequence[Item]) -> list[StepFrame | TensorFrame]:
    def fail(what: str, error: Exception) -> None:
        raise AssertionError(what) from error

    address = Address(topics=Topics(), origin=ORIGIN, source="/runs/r1")
    frames = []
    for record in Encoder(address, fail).encode(items, dropped=0):
        found = decode(read_meta(record.headers), record.value or b"")
        assert isinstance(found, StepFrame | TensorFrame)
        frames.append(found)
    return frames


def row(step: int, columns: tuple[str, ...] = STEP, mode: Mode = "train") -> StepRow:
    values = tuple(float(100 * step + len(name)) for name in columns)
    return StepRow(step, 1000 + step, columns, values, mode)


def summary(step: int) -> TensorFrame:
    return TensorFrame(
        origin=ORIGIN,
        step=step,
        collection="gradients",
        rows=("weight",),
        columns=("l2",),
        values=np.zeros((1, 1), np.float32),
        count_columns=("numel",),
        counts=np.zeros((1, 1), np.uint64),
    )


def cells_of_rows(items: Sequence[Item]) -> Counter[tuple[Mode, int, str, float]]:
    return Counter(
        (item.mode, item.step, name, value)
        for item in items
        if isinstance(item, StepRow)
        for name, value in zip(item.columns, item.values, strict=True)
    )


def cells_of_frames(frames: Sequence[StepFrame]) -> Counter[tuple[Mode, int, str, float]]:
    return Counter(
        (frame.mode, step, name, value)
        for frame in frames
        for step, values in zip(frame.steps.tolist(), frame.values.tolist(), strict=True)
        for name, value in zip(frame.columns, values, strict=True)
    )


rows = st.builds(
    row, st.integers(0, 40), st.sampled_from(COLUMNS), st.sampled_from(["train", "eval"])
)
summaries = st.builds(summary, st.integers(0, 40))


@given(st.lists(st.one_of(rows, rows, rows, summaries), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_flush_is_in_the_order_of_its_steps_and_loses_nothing(items: list[Item]) -> None:
    frames = encoded(items)
    steps = [frame for frame in frames if isinstance(frame, StepFrame)]
    assert cells_of_frames(steps) == cells_of_rows(items)
    assert sum(isinstance(frame, TensorFrame) for frame in frames) == sum(
        isinstance(item, TensorFrame) for item in items
    )
    between: list[int] = []
    for frame in frames:
        if isinstance(frame, TensorFrame):
            between.clear()
            continue
        between += frame.steps.tolist()
        assert between == sorted(between)


def test_a_rule_takes_the_loss_of_each_step_whatever_else_was_read_of_it() -> None:
    taken = [row(step, EXACT if step % 12 == 7 else STEP) for step in range(250)]
    lead = RankSeries()
    for frame in encoded(taken):
        assert isinstance(frame, StepFrame)
        if lead.accepts(frame):
            list(lead.points(frame, "loss"))
    assert lead.steps[-200:] == list(range(50, 250))


def test_scalars_of_the_user_do_not_cut_the_frames_of_the_steps() -> None:
    items = [part for step in range(100) for part in (row(step, ("log.accuracy",)), row(step))]
    (frame,) = encoded(items)
    assert isinstance(frame, StepFrame)
    assert frame.columns == ("log.accuracy", *STEP)
    assert frame.steps.tolist() == list(range(100))
    assert frame.at_us.tolist() == [1000 + step for step in range(100)]


def test_a_scalar_that_is_said_twice_in_a_step_stays_twice() -> None:
    items = [row(3, ("log.accuracy",)), row(3, ("log.accuracy",)), row(3)]
    cells = cells_of_frames([f for f in encoded(items) if isinstance(f, StepFrame)])
    assert cells == cells_of_rows(items)
