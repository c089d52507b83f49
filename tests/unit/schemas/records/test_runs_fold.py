"""The one fold of a bus into runs as people see them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.records.issues import (
    NOW_MS,
    TOPICS,
    incarnation,
    issue,
    issue_record,
    record,
    view,
    view_record,
)
from support.records.steps import steps
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Delivery, DeliveryState
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.runs import (
    Heartbeat,
    RunData,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.records.runs_fold import MAX_INCARNATIONS, RunSeen, RunsView
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopExited, StopRequested
from tocsin.schemas.records.wire import Meta, event_data, read_event


def read(written: Outgoing, offset: int = 0, at_ms: int = NOW_MS) -> Record:
    return Record(written.partition, offset, at_ms, written.key, written.value, written.headers)


def delivery(state: DeliveryState = "pending", created_ms: int = NOW_MS) -> Delivery:
    return Delivery(
        delivery_id="d", issue_id=issue(str(created_ms)).issue_id, run_id="run-1",
        incarnation=incarnation(), rule="nonfinite", issue_state="firing", action="hook",
        kind="webhook", state=state, reason="r", created_ms=created_ms, updated_ms=created_ms,
        give_up_ms=created_ms,
    )  # fmt: skip


def telemetry(kind: type[RunData], training: int = 0, **fields: object) -> RunData:
    who = {"run_id": "run-1", "incarnation": incarnation(training=training), "command_id": "c"}
    return kind.model_validate(who | {"job_id": "j"} | fields)


def heard(*events: RunData, first: int = 10) -> RunSeen:
    """The run after a view up to offset 1, and these events from offset `first` on."""
    known = RunsView()
    known.add(view())
    for offset, data in enumerate(events, first):
        known.add(data, offset=offset, append_ms=NOW_MS + offset)
    return known.seen["run-1"]


def test_the_view_that_knows_most_of_an_incarnation_counts() -> None:
    known = RunsView()
    assert known.add(view(ended=True, next_offset=9))
    assert not known.add(view(next_offset=5)), "a worker that reads again from an older state"
    assert known.add(view(ended=True, next_offset=9)), "the same, with other rules"
    (run,) = known.runs
    assert (run.state, run.next_offset) == ("ended", 9)


def test_each_incarnation_keeps_its_view() -> None:
    known = RunsView()
    known.add(view(next_offset=5))
    assert known.add(view(training=1, next_offset=9))
    assert not known.add(view(ended=True, next_offset=7)), "it is not the newest"
    seen = known.seen["run-1"]
    assert seen.incarnation == incarnation(training=1)
    assert [one.state for one in seen.views.values()] == ["ended", "running"]
    assert known.run("run-1") == seen.view == seen.views[seen.incarnation]


def test_a_run_that_restarts_for_ever_keeps_its_newest_views() -> None:
    known = RunsView()
    for training in range(MAX_INCARNATIONS + 5):
        known.add(view(training=training, next_offset=training))
    views = known.seen["run-1"].views
    assert len(views) == MAX_INCARNATIONS
    assert incarnation(training=4) not in views
    assert incarnation(training=MAX_INCARNATIONS + 4) in views


def test_an_issue_has_its_newest_state_and_all_its_states_once() -> None:
    known = RunsView()
    resolved = issue(resolved=True).model_copy(update={"at_ms": NOW_MS + 9, "step": 12})
    for data in (issue(), issue(), resolved):
        known.add(data)
    (found,) = known.issues
    assert found.state == "resolved"
    states = known.states(found.issue_id)
    assert [(seen.state, seen.at_ms, seen.step) for seen in states] == [
        ("firing", NOW_MS, None),
        ("resolved", NOW_MS + 9, 12),
    ]
    assert known.states("another") == []


def test_a_delivery_that_is_final_is_not_pending_again_unless_a_person_says_so() -> None:
    """A worker that was frozen wakes up, and writes what it was at."""
    known = RunsView()
    for one in (delivery(), delivery("delivered"), delivery()):
        known.add(one)
    (found,) = known.deliveries
    assert found.state == "delivered"
    known.add(delivery().model_copy(update={"redrives": 1}))
    (found,) = known.deliveries
    assert found.state == "pending"


def test_issues_and_deliveries_come_in_order_of_time() -> None:
    known = RunsView()
    for when in (3, 1, 2):
        known.add(issue(f"run-{when}").model_copy(update={"onset_ms": when}))
        known.add(delivery(created_ms=when))
        known.add(view(f"run-{when}").model_copy(update={"started_ms": when}))
    assert [found.onset_ms for found in known.issues] == [1, 2, 3]
    assert [found.created_ms for found in known.deliveries] == [1, 2, 3]
    assert [found.started_ms for found in known.runs] == [1, 2, 3]


def test_what_is_taken_away_is_gone() -> None:
    known = RunsView()
    event = Event.wrap(delivery(), id="1", source="/actions", time_ms=NOW_MS)
    written = [view_record(view()), record(event, TOPICS.actions, 0, delivery().key)]
    for out in written:
        assert known.apply(read(out))
    for out in written:
        assert known.apply(read(Outgoing(out.partition, out.key, None)))
        assert not known.apply(read(Outgoing(out.partition, out.key, None)))
    assert (known.runs, known.deliveries) == ([], [])
    assert known.delivery(delivery().key) is None


def test_a_command_counts_from_when_it_first_came() -> None:
    known = RunsView()
    command = StopRequested(
        command_id="c", run_id="run-1", incarnation=incarnation(), reason="r",
        requested_ms=1, not_after_ms=2, nonce="n",
    )  # fmt: skip
    known.add(command, append_ms=5)
    known.add(command, append_ms=9)
    assert known.commands["c"].append_ms == 5


def test_only_the_run_that_is_wanted_is_known() -> None:
    known = RunsView("run-2")
    for data in (view(), issue(), delivery(), telemetry(Heartbeat)):
        assert not known.add(data)
    assert known.accepts("run-1", "i", 0, 0) is None
    assert known.add(view("run-2"))
    assert list(known.seen) == ["run-2"]


def test_with_a_limit_the_oldest_go_first_and_what_runs_stays() -> None:
    known = RunsView(limit=50)
    for when in range(200):
        made = view(f"run-{when}", ended=when != 3).model_copy(update={"ended_ms": when})
        known.add(made)
        known.add(issue(f"run-{when}").model_copy(update={"onset_ms": when}))
        known.add(delivery(created_ms=when))
    for kept in (known.seen, known.issues, known.deliveries):
        assert 45 <= len(kept) <= 50
    assert {"run-3", "run-199"} <= known.seen.keys()
    assert known.issues[-1].onset_ms == known.deliveries[-1].created_ms == 199
    assert known.states(issue("run-0").issue_id) == []


# Telemetry


def test_a_launcher_reports_the_end_and_a_rank_does_not() -> None:
    assert heard(telemetry(RunEnded, outcome="completed")).ended is None
    ended = heard(telemetry(RunEnded, role="launcher", outcome="failed", exit_code=3)).ended
    assert ended is not None
    assert (ended.outcome, ended.exit_code) == ("failed", 3)


def test_answers_beyond_the_view_are_folded_until_a_view_covers_them() -> None:
    run = heard(telemetry(StopAcknowledged), telemetry(StopExited, how="edge", exit_code=79))
    assert run.stop is not None
    assert (run.stop.state, run.stop.exit_code) == ("exited", 79)
    run.add_view(view(next_offset=11))
    assert run.stop.state == "exited", "the view does not know of the last answer"
    covering = StopView(state="exited", command_id="c", reason="by the rules")
    run.add_view(view(stop=covering, next_offset=12))
    assert run.stop == covering


@pytest.mark.parametrize(
    ("event", "starts"),
    [
        (telemetry(RunStarted, 1), True),
        (telemetry(RunStarted, 1, role="launcher"), True),
        (telemetry(Heartbeat, 1), True),
        (telemetry(Heartbeat, 1, role="launcher"), False),
        (telemetry(RunEnded, 1, outcome="completed"), False),
        (telemetry(StopAcknowledged, 1), False),
    ],
)
def test_what_starts_a_new_incarnation(event: RunData, starts: bool) -> None:
    run = heard(event)
    assert (run.incarnation == incarnation(training=1)) is starts
    assert heard(event, first=0).incarnation == incarnation(), "the view has read that already"


def test_a_new_incarnation_starts_without_the_end_and_the_stop_of_the_last() -> None:
    run = heard(
        telemetry(StopAcknowledged),
        telemetry(RunEnded, role="launcher", outcome="stopped"),
        telemetry(RunStarted, 1),
        telemetry(RunEnded, role="launcher", outcome="stopped"),
    )
    assert run.incarnation == incarnation(training=1)
    assert (run.stop, run.ended, run.view) == (None, None, None)
    assert run.started_ms == NOW_MS + 12


def test_of_several_launchers_the_ranks_say_which_incarnation_it_is() -> None:
    run = heard(
        telemetry(RunStarted, 1, role="launcher"),
        telemetry(RunStarted, 2, role="launcher"),
        telemetry(RunStarted, 1),
        telemetry(RunStarted, 2),
    )
    assert run.incarnation == incarnation(training=1), "2 was passed when a rank spoke of 1"


ANYTHING: list[Data] = [
    view(),
    view(next_offset=9),
    view(ended=True, next_offset=20),
    view(training=1, next_offset=30),
    issue(),
    issue(resolved=True).model_copy(update={"at_ms": NOW_MS + 5}),
    issue(training=1),
    delivery(),
    delivery("delivered"),
    telemetry(RunStarted),
    telemetry(RunStarted, 1),
    telemetry(Heartbeat),
    telemetry(RunEnded, role="launcher", outcome="stopped", exit_code=79),
    telemetry(StopAcknowledged),
    telemetry(StopExited, how="edge", exit_code=79),
]


@given(st.lists(st.sampled_from(ANYTHING), max_size=30), st.data())
def test_what_is_read_again_changes_nothing(events: list[Data], data: st.DataObject) -> None:
    """The bus gives a record at least once, and a reader that was away begins further back."""
    once, again = RunsView(), RunsView()

    def read_from(known: RunsView, first: int, last: int) -> None:
        for offset in range(first, last):
            known.add(events[offset], offset=offset, append_ms=NOW_MS + offset)

    read_from(once, 0, len(events))
    away = data.draw(st.integers(0, len(events)))
    read_from(again, 0, away)
    read_from(again, data.draw(st.integers(0, away)), len(events))
    assert (once.runs, once.issues, once.deliveries) == (again.runs, again.issues, again.deliveries)
    for found in once.issues:
        assert once.states(found.issue_id) == again.states(found.issue_id)


# Records


BAD: Mapping[str, Outgoing] = {
    "malformed": Outgoing(Partition("t", 0), b"k", b"{}", Meta("tocsin.issue.firing").headers()),
    "unknown": Outgoing(Partition("t", 0), b"k", b"{}", Meta("of.next.year").headers()),
    "headers": Outgoing(Partition("t", 0), b"k", b"{}"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_counted(name: str) -> None:
    known = RunsView()
    assert known.apply(read(BAD[name]))
    assert known.unread == 1
    assert event_data(read(BAD[name])) is None
    with pytest.raises(RecordError):
        read_event(read(BAD[name]))


def test_numbers_and_tombstones_are_no_events() -> None:
    numbers = steps("run-1", {1: 2.0})
    assert read_event(numbers) is None
    # They are not even decoded.
    assert read_event(read(Outgoing(Partition("t", 0), b"", b"?", numbers.headers))) is None
    assert read_event(read(Outgoing(Partition("t", 0), b"k", None))) is None
    known = RunsView()
    assert not known.apply(numbers)
    assert known.unread == 0


def test_an_event_is_read_with_its_envelope() -> None:
    found: Event[Data] | None = read_event(read(issue_record(issue())))
    assert found is not None
    assert (found.data, found.time_ms) == (issue(), NOW_MS)
    assert event_data(read(issue_record(issue()))) == issue()
