"""What `tocsin watch` makes of the records that it reads."""

from __future__ import annotations

import math

import pytest

from support.records.issues import (
    NOW_MS,
    TOPICS,
    incarnation,
    issue,
    issue_record,
    view,
    view_record,
)
from support.records.steps import steps
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.console.views.sparkline import (
    BLOCKS,
    NONFINITE,
    POINTS,
    LossSeries,
    StepRate,
    merged,
    sparkline,
)
from tocsin.console.watch import state as watch_state
from tocsin.console.watch.state import WatchedRun, WatchState
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.wire import Meta, meta_of
from tocsin.schemas.topics import telemetry_partition


def run(state: WatchState, run_id: str = "r") -> WatchedRun:
    found = state.run(run_id)
    assert found is not None
    return found


def read(written: Outgoing, at_ms: int = NOW_MS) -> Record:
    """As a reader gets it."""
    return Record(written.partition, 0, at_ms, written.key, written.value, written.headers)


def test_the_newest_view_of_a_run_counts_until_it_is_forgotten() -> None:
    state = WatchState(TOPICS)
    assert state.apply(read(view_record(view(next_offset=1))))
    ended = view_record(view(ended=True, next_offset=2))
    assert state.apply(read(ended))
    r = run(state, "run-1")
    assert r.seen.view is not None
    assert r.seen.view.state == "ended"
    assert state.apply(read(Outgoing(ended.partition, ended.key, None)))
    assert not state.view.seen


def test_steps_of_telemetry_are_seen_before_any_view() -> None:
    state = WatchState(TOPICS)
    for i in range(20):
        state.apply(steps("r", {2 * i: 2.0, 2 * i + 1: 1.5}, at_ms=NOW_MS + 500 * i))
    r = run(state)
    assert (r.step, r.loss, len(r.series)) == (39, 1.5, 40)
    assert r.per_s(NOW_MS + 9_500) == 4.0
    assert r.per_s(NOW_MS + 60_000) is None
    assert r.seen.running


def test_an_older_view_does_not_turn_the_steps_back_and_a_newer_one_goes_on() -> None:
    state = WatchState(TOPICS)
    told = view("r").model_copy(update={"last_step": 10, "last_loss": 3.0})
    state.apply(read(view_record(told)))
    assert run(state).loss == 3.0
    state.apply(steps("r", {9: 3.5, 10: 3.0, 11: 2.5}))
    assert (run(state).step, len(run(state).series)) == (11, 3)
    later = told.model_copy(update={"last_step": 500, "last_loss": 0.5})
    state.apply(read(view_record(later)))
    r = run(state)
    assert (r.step, r.loss, len(r.series)) == (500, 0.5, 3)
    for i in range(1, 3):
        later = told.model_copy(update={"last_step": 500 + i, "last_loss": 0.5})
        state.apply(read(view_record(later), NOW_MS + 20_000 * i))
    assert len(r.series) == 4, "telemetry is not read any more: the views' points it is"


def test_a_new_training_of_a_run_begins_again_and_what_the_old_one_says_late_is_ignored() -> None:
    state = WatchState(TOPICS)
    state.apply(steps("r", {900: 1.0}, offset=5))
    state.apply(steps("r", {0: 7.0}, offset=6, training=1))
    assert (run(state).step, run(state).loss) == (0, 7.0)
    assert not state.apply(steps("r", {901: 1.0}, offset=7))
    assert not state.apply(read(view_record(view("r", next_offset=6))))
    assert run(state).seen.view is None


def started(training: int, offset: int) -> Record:
    """A rank of run `r` has begun to train."""
    data = RunStarted(
        run_id="r", incarnation=incarnation("r", training), role="trainer", job_id="j"
    )
    event = Event.wrap(data, id="1", source="/r", time_ms=NOW_MS)
    place = Partition(TOPICS.telemetry, telemetry_partition("r"))
    headers = meta_of(event).headers()
    return Record(place, offset, NOW_MS, b"r", event.encode(), headers)


# The second training of one launcher has the start of the launcher, too.
@pytest.mark.parametrize("began_ms", [NOW_MS, NOW_MS - 90_000])
def test_telemetry_from_before_the_view_does_not_turn_back_to_an_older_training(
    began_ms: int,
) -> None:
    state = WatchState(TOPICS)
    told = view("r", training=1, next_offset=8).model_copy(update={"started_ms": began_ms})
    assert state.apply(read(view_record(told)))
    assert not state.apply(started(0, 1))
    assert not state.apply(steps("r", {900: 1.0}, at_ms=NOW_MS - 60_000, offset=2))
    assert state.apply(started(1, 6))
    assert state.apply(steps("r", {0: 7.0}, offset=7, training=1))
    r = run(state)
    assert (r.step, r.loss) == (0, 7.0)
    assert r.seen.view == told
    assert state.apply(steps("r", {0: 9.0}, offset=8, training=2)), "a newer one still begins"
    assert r.seen.incarnation == incarnation("r", 2)
    assert run(state).seen.view is None


@pytest.mark.parametrize("newer", [{"next_offset": 9}, {"started_ms": NOW_MS + 1}])
def test_a_newer_view_always_counts(newer: dict[str, int]) -> None:
    state = WatchState(TOPICS)
    first = view("r", training=1, next_offset=4).model_copy(update={"started_ms": NOW_MS - 9})
    state.apply(read(view_record(first)))
    state.apply(steps("r", {900: 1.0}, offset=7))
    assert run(state).seen.incarnation == incarnation("r", 0), "late, but nobody can know"
    assert not state.apply(read(view_record(first)))
    later = first.model_copy(update=newer)
    assert state.apply(read(view_record(later)))
    assert run(state).seen.view == later
    assert state.apply(steps("r", {1: 5.0}, offset=10, training=1))
    assert not state.apply(steps("r", {901: 1.0}, offset=11))
    assert run(state).step == 1


def test_other_ranks_evaluations_and_own_scalars_do_not_mix_with_the_loss() -> None:
    state = WatchState(TOPICS)
    state.apply(steps("r", {3: 1.0}))
    assert not state.apply(steps("r", {4: 99.0}, rank=1))
    state.apply(steps("r", {3: 2.0}, mode="eval"))
    state.apply(steps("r", {5: 42.0}, column="log.accuracy"))
    r = run(state)
    assert (r.step, r.loss, r.progress.eval_loss) == (5, 1.0, 2.0)


def test_a_run_that_has_only_started_is_shown() -> None:
    state = WatchState(TOPICS)
    assert state.apply(started(0, 0))
    assert (run(state).seen.started_ms, run(state).step) == (NOW_MS, None)


def test_what_cannot_be_read_is_counted_and_the_rest_goes_on() -> None:
    state = WatchState(TOPICS)
    place = Partition(TOPICS.issues, 0)
    bad = [
        Outgoing(place, b"k", b"{}", Meta("tocsin.issue.firing").headers()),
        Outgoing(place, b"k", b"{}", Meta("tocsin.of.next.year").headers()),
        Outgoing(place, b"k", b"\xff\x00", Meta("tocsin.issue.firing", version=7).headers()),
        Outgoing(place, b"k", b"no headers"),
        Outgoing(Partition(TOPICS.telemetry, 0), b"k", b"short", Meta("steps").headers()),
    ]
    for record in bad:
        assert state.apply(read(record))
    assert state.view.unread == len(bad)
    assert state.apply(read(issue_record(issue())))
    assert len(state.view.issues) == 1
    unknown = Outgoing(Partition(TOPICS.telemetry, 0), b"k", b"?", Meta("of.next.year").headers())
    assert not state.apply(read(unknown)), "telemetry of no interest is not even decoded"


def test_only_the_run_that_was_asked_for_is_kept() -> None:
    state = WatchState(TOPICS, "run-2")
    for run in ("run-1", "run-2"):
        state.apply(read(view_record(view(run))))
        state.apply(read(issue_record(issue(run))))
        state.apply(steps(run, {1: 1.0}))
    assert list(state.view.seen) == ["run-2"]
    assert {found.run_id for found in state.view.issues} == {"run-2"}


def test_running_runs_come_first_then_the_one_that_ended_last() -> None:
    state = WatchState(TOPICS)
    for name, ended_ms in (("old", 1_000), ("new", 2_000), ("a", None), ("b", None)):
        made = view(name, ended=ended_ms is not None)
        began_ms = 50 if name == "b" else 10
        made = made.model_copy(update={"ended_ms": ended_ms, "started_ms": began_ms})
        state.apply(read(view_record(made)))
    assert [run.seen.run_id for run in state.ordered_runs()] == ["b", "a", "new", "old"]


def test_memory_is_bounded() -> None:
    state = WatchState(TOPICS)
    for i in range(watch_state.MAX_SHOWN + 200):
        made = view(f"run-{i}", ended=i != 3).model_copy(update={"ended_ms": 1 + i})
        state.apply(read(view_record(made)))
        found = issue(f"run-{i}").model_copy(update={"onset_ms": i})
        state.apply(read(issue_record(found)))
    assert len(state.view.seen) <= watch_state.MAX_SHOWN
    assert len(state.view.issues) <= watch_state.MAX_SHOWN
    assert {"run-3", f"run-{watch_state.MAX_SHOWN + 199}"} <= set(state.view.seen)
    assert state.view.issues[-1].onset_ms == watch_state.MAX_SHOWN + 199
    series = LossSeries()
    for i in range(100_000):
        series.add(float(i))
    assert len(series) <= POINTS
    assert sum(bucket.count for bucket in series.buckets(POINTS)) == 100_000


def test_telemetry_is_read_from_a_while_ago_and_of_the_runs_shown_first() -> None:
    state = WatchState(TOPICS)
    made = view("gone", ended=True).model_copy(update={"ended_ms": NOW_MS - 3_600_000})
    state.apply(read(view_record(made)))
    state.apply(read(view_record(view("here"))))
    places = state.places(NOW_MS, 12)
    assert places[telemetry_partition("here")] == NOW_MS - watch_state.BACK_MS
    assert places[telemetry_partition("gone")] < NOW_MS - 3_600_000
    assert set(state.places(NOW_MS, 1)) == {telemetry_partition("here")}
    unknown = WatchState(TOPICS)
    made = view("lost").model_copy(update={"state": "lost"})
    unknown.apply(read(view_record(made)))
    assert set(unknown.places(NOW_MS, 1).values()) == {NOW_MS - watch_state.BACK_MS}


def test_losses_seen_before_an_outage_are_kept_for_the_same_training() -> None:
    before, after = WatchState(TOPICS), WatchState(TOPICS)
    for name in ("same", "other"):
        before.apply(steps(name, {1: 5.0, 2: 4.0}))
    after.apply(read(view_record(view("same"))))
    after.apply(read(view_record(view("other", training=1))))
    after.carry_over(before)
    assert (run(after, "same").step, run(after, "other").step) == (2, None)


def made_series(values: list[float]) -> LossSeries:
    series = LossSeries()
    for value in values:
        series.add(value)
    return series


def drawn(values: list[float], width: int = 80) -> str:
    return sparkline(made_series(values).buckets(width))


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert drawn([float(i) for i in range(8)]) == BLOCKS
    assert len(drawn([float(i) for i in range(1_000)], width=17)) == 17


def test_a_wide_range_is_drawn_in_logarithms() -> None:
    assert drawn([10.0**i for i in range(8)]) == BLOCKS


def test_what_is_not_finite_is_marked_and_does_not_flatten_the_rest() -> None:
    line = drawn([1.0, 8.0, math.nan, math.inf, -math.inf])
    assert line == BLOCKS[0] + BLOCKS[-1] + 3 * NONFINITE
    assert drawn([math.nan] * 3) == 3 * NONFINITE
    assert drawn([]) == ""


def test_values_without_a_range_or_beyond_floats_are_drawn_flat() -> None:
    assert len(set(drawn([2.0] * 5))) == 1
    assert len(drawn([-1.7e308, 1.7e308])) == 2
    assert len(drawn([1.7e308] * POINTS * 3, width=5)) == 5


def test_neighbours_are_merged_without_losing_any() -> None:
    buckets = made_series([float(i) for i in range(100)]).buckets(7)
    assert sum(bucket.count for bucket in buckets) == 100
    assert merged(buckets, 100) == buckets


def test_a_rate_needs_two_steps_and_forgets_what_is_long_ago() -> None:
    rate = StepRate()
    assert rate.per_s(0) is None
    rate.add(1, 1_000)
    assert rate.per_s(1_000) is None
    for second in range(2, 60):
        rate.add(second if second < 30 else 29 + 10 * (second - 29), 1_000 * second)
    assert rate.per_s(59_500) == 10.0
    slow = StepRate()
    slow.add(1, 0)
    slow.add(2, 40_000)
    assert slow.per_s(70_000) == 0.025
