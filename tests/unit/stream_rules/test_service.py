"""The service between the worker and the engine: what it writes, and where."""

from __future__ import annotations

import math

import pytest

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime.service import Attachment, CaughtUp, Tick
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sections import DefaultsConfig
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.stops.commands import StopExited
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import (
    STATE_KEEP_MS,
    VIEW_KEEP_MS,
    Topics,
    issue_partition,
    telemetry_partition,
)
from tocsin.stream_rules.engine.run import KEEP_MS
from tocsin.stream_rules.engine.saved_states import SavedStates
from tocsin.stream_rules.service import AT_ONCE, RulesService, build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()


async def _nobody(run_id: str) -> bool:
    return False


def service(*, shared: bool = False) -> RulesService:
    rules = build_rules_service(TOPICS)
    rules.attached(Attachment(lambda: None, skip=_nobody if shared else None))
    return rules


def bad_run() -> RunBuilder:
    run = RunBuilder()
    run.started()
    run.steps(range(5), loss=1.0)
    run.steps([5], loss=math.nan)
    return run


def as_records(written: list[Outgoing]) -> list[Record]:
    return [Record(o.partition, i, 0, o.key, o.value, o.headers) for i, o in enumerate(written)]


def issues(rules: RulesService) -> list[Outgoing]:
    """What it writes to the issues topic, of all that there is to write now."""
    return [o for o in rules.outputs() if o.partition.topic == TOPICS.issues]


def states(rules: RulesService) -> list[Outgoing]:
    """What it writes to the topic of the states, of all that there is to write now."""
    return [o for o in rules.snapshots(force=True) if o.partition.topic == TOPICS.state]


def tick(run: RunBuilder) -> Tick:
    return Tick(run.now_ms, frozenset({run.records[0].partition.number}))


def test_issues_go_to_the_runs_issue_partition() -> None:
    run = bad_run()
    rules = service()
    assert rules.apply(run.records, tick(run)) == []
    (issue,) = issues(rules)
    assert issue.partition == Partition(TOPICS.issues, issue_partition("made"))
    assert issue.key == b"made"
    assert issue.value is not None
    event = decode(read_meta(issue.headers), issue.value)
    data = event.data  # type: ignore[union-attr]
    assert isinstance(data, IssueFiring)
    assert event.id == f"{data.issue_id}/firing/0"  # type: ignore[union-attr]
    assert event.source == "/runs/made/rules/nonfinite"  # type: ignore[union-attr]
    assert rules.outputs() == []


def test_snapshots_stand_beside_the_input_the_runs_own_behind_its_rules() -> None:
    run = bad_run()
    rules = service()
    rules.apply(run.records, tick(run))
    written = list(rules.snapshots(force=False))
    number = telemetry_partition("made")
    assert {o.partition for o in written[:-1]} == {Partition(TOPICS.state, number)}
    assert [o.key for o in written[-2:]] == [b"made/_run", b"made"]
    assert written[0].key == b"made/nonfinite"
    assert written[-1].partition == Partition(TOPICS.runs, number)
    assert written[-1].value is not None
    view = decode(read_meta(written[-1].headers), written[-1].value).data  # type: ignore[union-attr]
    assert isinstance(view, RunView)
    assert (view.state, view.next_offset, view.issues) == ("running", len(run.records), 1)
    assert list(rules.snapshots(force=False)) == []


def restarted(run: RunBuilder, at: int, *, shared: bool = False) -> RulesService:
    first = service()
    first.apply(run.records[:at], tick(run))
    first.outputs()
    written = states(first)
    second = service(shared=shared)
    second.restore(run.records[0].partition.number, as_records(written))
    second.restored(run.records[0].partition.number, at)
    return second


def test_after_a_restart_records_below_the_snapshot_are_skipped() -> None:
    run = bad_run()
    for at in range(1, len(run.records)):
        rules = restarted(run, at)
        rules.apply(run.records, tick(run))
        assert len(issues(rules)) == 1


def test_the_highest_next_offset_counts_not_the_last_record() -> None:
    run = bad_run()
    early, late = service(), service()
    early.apply(run.records[:2], tick(run))
    late.apply(run.records, tick(run))
    late_states = states(late)
    rules = service()
    number = run.records[0].partition.number
    rules.restore(number, as_records([*late_states, *states(early)]))
    rules.restored(number, 2)
    newest = {o.key: Snapshot.decode(o.value or b"") for o in late_states}
    assert states(rules) == [], "of what comes before them nothing was read yet"
    rules.apply(run.records, tick(run))
    again = {o.key: Snapshot.decode(o.value or b"") for o in states(rules)}
    assert again.keys() == newest.keys(), "compaction would leave the older ones"
    for key, one in again.items():
        assert one.payload == newest[key].payload
        assert one.next_offset == newest[key].next_offset
    assert rules.outputs() == []


def test_of_states_in_their_order_none_is_written_once_more() -> None:
    run = bad_run()
    first = service()
    first.apply(run.records, tick(run))
    written = states(first)
    rules = service()
    number = run.records[0].partition.number
    rules.restore(number, as_records(written))
    rules.restored(number, len(run.records))
    assert states(rules) == []


def test_of_many_runs_those_that_are_heard_of_are_taken_up_first() -> None:
    runs = [RunBuilder(f"run-{number}") for number in range(3 * AT_ONCE)]
    first, rules = service(), service()
    for run in runs:
        run.started()
        run.steps(range(3), loss=1.0)
        first.apply(run.records, tick(run))
    saved = as_records(
        [o for o in first.snapshots(force=True) if o.partition.topic == TOPICS.state]
    )
    nudged: list[int] = []
    rules.attached(Attachment(lambda: nudged.append(1)))
    for number in {record.partition.number for record in saved}:
        rules.restore(number, [one for one in saved if one.partition.number == number])
        rules.restored(number, 3)

    assert len(rules.engine.runs()) == AT_ONCE
    assert nudged, "it asks for another round"
    assert not rules.settled()
    last = runs[-1]
    last.steps([3], loss=math.nan)
    rules.apply(last.records[-1:], tick(last))
    assert len(issues(rules)) == 1, "the run that speaks is there at once, with its state"
    while not rules.settled():
        rules.apply((), tick(last))
    assert {run.state.run_id for _, _, run in rules.engine.runs()} == {run.run_id for run in runs}


def test_only_what_has_changed_is_saved_again() -> None:
    run = bad_run()
    rules = service()
    rules.apply(run.records, tick(run))
    first = {o.key: o.value for o in rules.snapshots(force=False)}
    at = len(run.records)
    run.system({"cpu.percent": [50.0]})
    rules.apply(run.records[at:], tick(run))
    second = {o.key for o in rules.snapshots(force=False)}
    assert b"made/_run" in second
    assert b"made/cpu_bottleneck" in second
    assert b"made/loss_spike" not in second
    assert len(second) < len(first) / 2


def test_timers_go_on_after_a_restart_though_the_run_is_silent() -> None:
    run = bad_run()
    rules = restarted(run, 4)
    due = rules.next_due_ms()
    assert due is not None
    number = run.records[0].partition.number
    caught_up = {number: CaughtUp(as_of_ms=run.now_ms + 130_000, since_ms=run.now_ms)}
    rules.apply([], Tick(run.now_ms + 130_000, frozenset({number}), caught_up))
    assert [o.key for o in issues(rules)] == [b"made"]
    covered = {Snapshot.decode(o.value or b"").next_offset for o in states(rules)}
    assert covered == {4}, "what is saved before a record came is of the same records as before"


def test_where_others_may_have_the_run_it_waits_for_a_record() -> None:
    run = bad_run()
    rules = restarted(run, 4, shared=True)
    assert rules.next_due_ms() is None
    rules.apply(run.records[4:], tick(run))
    assert len(issues(rules)) == 1


def test_a_timer_does_not_fire_while_there_is_lag() -> None:
    run = RunBuilder()
    run.started()
    rules = service()
    rules.apply(run.records, tick(run))
    number, later = telemetry_partition("made"), run.now_ms + 10_000_000
    rules.apply([], Tick(later, frozenset({number})))
    assert rules.outputs() == []
    rules.apply([], Tick(later, frozenset({number}), {number: CaughtUp(later, run.now_ms)}))
    assert rules.outputs() != [], "it was due all the time"


def test_a_bad_record_is_handed_back_and_the_rest_is_taken() -> None:
    run = bad_run()
    bad = Record(run.records[0].partition, 99, run.now_ms, b"made", b"?", ())
    rules = service()
    poison = rules.apply([bad, *run.records], tick(run))
    assert [one.record.offset for one in poison] == [99]
    assert len(issues(rules)) == 1


def test_a_day_after_its_end_a_runs_state_is_taken_away() -> None:
    run = bad_run()
    run.ended()
    rules = service()
    rules.apply(run.records, tick(run))
    assert rules.wants_checkpoint()
    rules.snapshots(force=False)
    assert not rules.wants_checkpoint()
    number = run.records[0].partition.number
    later = run.now_ms + KEEP_MS
    rules.apply([], Tick(later, frozenset({number}), {number: CaughtUp(later, run.now_ms)}))
    gone = rules.snapshots(force=False)
    assert {o.value for o in gone} == {None}
    assert {o.key for o in gone} >= {b"made/_run", b"made/nonfinite"}
    assert rules.engine.run("made") is None
    fresh = service()
    fresh.restore(number, as_records(list(gone)))
    fresh.restored(number, 9)
    assert fresh.engine.run("made") is None


def test_the_state_of_a_rule_that_is_off_by_now_goes_with_its_run() -> None:
    run = bad_run()
    run.ended()
    before = service()
    before.apply(run.records, tick(run))
    number = run.records[0].partition.number
    config = Config(defaults=DefaultsConfig(rules="none"))
    rules = build_rules_service(TOPICS, config)
    rules.attached(Attachment(lambda: None))
    rules.restore(number, as_records(states(before)))
    rules.restored(number, len(run.records))
    later = run.now_ms + KEEP_MS
    rules.apply([], Tick(later, frozenset({number}), {number: CaughtUp(later, run.now_ms)}))
    assert b"made/nonfinite" in {o.key for o in states(rules) if o.value is None}


def test_partitions_that_go_take_their_runs_along() -> None:
    run = bad_run()
    rules = service()
    rules.apply(run.records, tick(run))
    rules.release({run.records[0].partition.number})
    assert rules.engine.runs() == []
    assert rules.next_due_ms() is None


def test_the_configuration_decides_which_rules_there_are() -> None:
    config = Config(defaults=DefaultsConfig(rules="none"))
    rules = build_rules_service(TOPICS, config)
    run = bad_run()
    rules.apply(run.records, tick(run))
    assert rules.outputs() == []


def test_a_stop_that_the_next_incarnation_follows_at_once_is_told_all_the_same() -> None:
    run = RunBuilder()
    run.started()
    rules = service()
    rules.apply(run.records, tick(run))
    rules.snapshots(force=False)
    known = len(run.records)
    of_launcher = StopExited(
        run_id="made",
        incarnation="made-1",
        role="launcher",
        command_id="c-1",
        how="edge",
        exit_code=79,
    )
    event: Event[Data] = Event.wrap(of_launcher, id="x", source="/runs/made", time_ms=run.now_ms)
    run.add(event)
    run.ended()
    run.incarnation = "made-2"
    run.started()

    rules.apply(run.records[known:], tick(run))
    views = []
    for one in rules.snapshots(force=False):
        if one.partition.topic == TOPICS.runs and one.value is not None:
            found = decode(read_meta(one.headers), one.value)
            assert isinstance(found, Event)
            assert isinstance(found.data, RunView)
            views.append(found.data)

    assert [view.incarnation for view in views] == ["made-1", "made-2"]
    assert views[0].stop is not None
    assert views[0].stop.state == "exited"
    assert views[1].stop is None
    assert views[0].next_offset <= views[1].next_offset


def test_a_view_that_nobody_has_renewed_for_long_is_taken_away() -> None:
    run = bad_run()
    number = run.records[0].partition.number
    where = Partition(TOPICS.runs, number)
    rules = service()
    assert list(rules.follows(number)) == [where]
    old_ms = run.now_ms - VIEW_KEEP_MS
    rules.restore(
        number,
        [
            Record(where, 0, old_ms - 5, b"gone", None),
            Record(where, 1, old_ms - 4, b"renewed", b"v"),
            Record(where, 2, old_ms - 3, b"old", b"v"),
            Record(where, 3, old_ms + 1, b"renewed", b"v"),
        ],
    )
    rules.restored(number, 0)
    rules.apply(run.records, tick(run))
    assert all(one.value is not None for one in rules.snapshots(force=False))
    rules.apply([Record(where, 4, run.now_ms, b"made", b"v")], tick(run))
    assert list(rules.snapshots(force=False)) == [Outgoing(where, b"old", None)]
    assert list(rules.snapshots(force=False)) == []


def test_states_that_nobody_has_renewed_for_long_are_forgotten() -> None:
    states = SavedStates()

    def state(number: int, offset: int, append_ms: int, run_id: str) -> Record:
        where, key = Partition(TOPICS.state, number), f"{run_id}/rule".encode()
        value = Snapshot(
            run_id=run_id, incarnation="i", rule="rule", rule_version=1, next_offset=offset,
            payload=b"",
        ).encode()  # fmt: skip
        return Record(where, offset, append_ms, key, value)

    for number, offset, append_ms, run_id in (
        (1, 0, 5, "old"), (1, 1, 6, "renewed"), (2, 0, 7, "another"),
        (1, 2, 6 + STATE_KEEP_MS, "renewed"), (2, 1, 8, "kept"),
    ):  # fmt: skip
        states.apply(number, state(number, offset, append_ms, run_id))
    states.drop_outdated()
    assert [states.runs(1), states.runs(2)] == [["renewed"], ["another", "kept"]]


def test_where_another_served_a_run_and_died_its_newest_state_is_gone_on_with() -> None:
    run = bad_run()
    number = run.records[0].partition.number
    other, rules = service(), service(shared=True)
    assert Partition(TOPICS.state, number) in rules.follows(number)
    rules.restored(number, 0)
    other.apply(run.records[:4], tick(run))
    saved = [o for o in other.snapshots(force=False) if o.partition.topic == TOPICS.state]

    rules.apply(as_records(saved), tick(run))
    rules.apply(run.records[2:], tick(run))

    assert len(issues(rules)) == 1
    state = rules.engine.run("made")
    assert state is not None
    assert (state.state.missing, state.state.last_step) == (0, 5)
    # An echo of its own state, of a run that it has, is none to go on with.
    rules.apply(as_records([*rules.snapshots(force=False)]), tick(run))
    assert rules.outputs() == []


def test_of_a_run_that_ended_elsewhere_other_rules_say_nothing() -> None:
    run = bad_run()
    run.ended()
    number = run.records[0].partition.number
    other = build_rules_service(TOPICS, Config(defaults=DefaultsConfig(rules="none")))
    other.apply(run.records, tick(run))
    saved = [o for o in other.snapshots(force=True) if o.partition.topic == TOPICS.state]
    rules = service(shared=True)
    rules.restored(number, 0)
    rules.apply(as_records(saved), tick(run))
    rules.apply(run.records, tick(run))
    assert rules.outputs() == []
    assert rules.snapshots(force=False) == []


@pytest.mark.parametrize("saved", [True, False], ids=["with a newer state", "with none"])
def test_a_run_that_was_taken_over_and_lost_again_comes_back_whole(saved: bool) -> None:
    run = RunBuilder()
    run.started()
    for step in range(9):
        run.steps([step], loss=1.0)
    run.steps([9], loss=math.nan)
    number = run.records[0].partition.number
    rules, helper = service(shared=True), service()
    rules.restored(number, 0)
    rules.apply(run.records[:4], tick(run))
    before = as_records([*rules.snapshots(force=False)])

    rules.lost({"made"})

    assert rules.engine.run("made") is None
    assert rules.next_due_ms() is None, "its timers are another's"
    assert list(rules.snapshots(force=True)) == [], "so are its states"
    # The helper goes on from what is on the bus, and may save before it dies.
    helper.restore(number, [one for one in before if one.partition.topic == TOPICS.state])
    helper.restored(number, 4)
    helper.apply(run.records[4:6], tick(run))
    newer = as_records([*helper.snapshots(force=False)]) if saved else []
    rules.apply([one for one in newer if one.partition.topic == TOPICS.state], tick(run))
    # What was held since, from the first record that was left out.
    rules.apply(run.records[4:], tick(run))

    back = rules.engine.run("made")
    assert back is not None
    assert (back.state.missing, back.state.duplicates, back.state.last_step) == (0, 0, 9)
    assert len(issues(rules)) == 1
