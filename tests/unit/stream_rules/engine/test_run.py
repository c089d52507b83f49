"""The engine: order, repeats, incarnations, timers, episodes, what it says of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tocsin.bus.port import Record
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.errors import MalformedRecord, RecordError, UnknownRecord
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.frames import Mode
from tocsin.schemas.records.run_view import RunView, TelemetryCounts
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopExited,
    StopLeft,
    StopRefused,
)
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs, specs_at_runtime
from tocsin.stream_rules.engine.listeners import MAX_KINDS
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord
from tocsin.stream_rules.engine.run import KEEP_MS, RunEngine
from tocsin.stream_rules.engine.run_state import RunState
from tocsin.stream_rules.engine.run_view import run_view
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

NAN = math.nan
NONFINITE = built_in().get("nonfinite")


def fed(run: RunBuilder) -> tuple[PartitionEngine, RunEngine]:
    engine = PartitionEngine(rule_specs())
    for record in run.records:
        engine.apply(record)
    state = engine.run(run.run_id)
    assert state is not None
    return engine, state


def view_of(run: RunBuilder) -> RunView:
    return run_view(fed(run)[1], next_offset=len(run.records))


def diverging() -> RunBuilder:
    run = RunBuilder(labels={"env": "test"})
    run.started(role="launcher")
    run.started()
    run.steps(range(100), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    run.checkpoint(99)
    run.steps(range(100, 160), loss=50.0, gradient_norm=1.0, gradient_nonfinite=0)
    run.steps([160], loss=NAN, gradient_norm=NAN, gradient_nonfinite=1)
    run.tensors(160, "gradients", ["a", "b"], nans={"b": 1})
    return run


def test_issues_carry_what_a_reader_needs() -> None:
    issues = [issue for issue in issues_of(diverging().records) if issue.state == "firing"]
    rules = ["loss_diverged", "loss_spike", "nonfinite"]
    assert [issue.rule for issue in issues] == rules
    for issue in issues:
        assert issue.labels == {"env": "test"}
        assert issue.incarnation == "made-1"
        assert issue.remedy
        assert issue.last_good_checkpoint is not None
        assert issue.last_good_checkpoint.step == 99
    episode = "||100|None|loss"
    assert issues[0].issue_id == issue_id("made", "made-1", "loss_diverged", 3, episode)


def test_repeated_records_change_nothing() -> None:
    run = diverging()
    doubled = RunBuilder()
    for record in run.records:
        doubled.records.append(replace(record, offset=len(doubled.records)))
        doubled.again(record)
    once, twice = (
        [issue.model_dump_json() for issue in issues_of(records)]
        for records in (run.records, doubled.records)
    )
    assert twice == once
    assert fed(doubled)[1].state.duplicates == len(run.records)


@pytest.mark.parametrize(("mode", "issues"), [("train", 1), ("eval", 0), ("predict", 0)])
def test_rules_are_given_tensors_of_the_mode_that_they_ask_for(mode: Mode, issues: int) -> None:
    run = RunBuilder()
    run.started()
    for step in range(0, 1000, 100):
        run.steps(range(step, step + 100), loss=1.0)
        run.tensors(step, "activations", ["a", "b"], mode=mode, columns={"dead": 0.9})
        run.tensors(step, "activations", ["a", "b"], columns={"dead": 0.9 * (mode == "train")})
    assert len(issues_of(run.records, "dead_relu")) == issues


def test_gaps_are_counted() -> None:
    run = RunBuilder()
    run.started()
    run.lose(records=3)
    run.steps(range(5), loss=1.0)
    assert fed(run)[1].state.missing == 3


def test_a_new_incarnation_begins_afresh_and_the_old_ones_rest_is_ignored() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    run.steps([0], loss=NAN)
    run.incarnation, run.boot = "made-2", "boot2"
    run.started()
    run.steps([0, 1], loss=2.0)
    run.incarnation, run.boot = "made-1", "boot"
    run.steps([1], loss=NAN)
    run.incarnation, run.boot = "made-2", "boot2"
    run.steps([2], loss=NAN)
    issues = issues_of(run.records, "nonfinite")
    assert [(i.incarnation, i.first_step, i.state) for i in issues] == [
        ("made-1", 0, "firing"),
        ("made-2", 2, "firing"),
    ]
    assert issues[0].issue_id != issues[1].issue_id
    assert fed(run)[1].state.late == 1


def test_the_same_fault_in_the_next_incarnation_is_a_new_issue() -> None:
    run = RunBuilder()
    run.steps([3], loss=NAN)
    run.incarnation, run.boot = "made-2", "boot2"
    run.steps([3], loss=NAN)
    ids = [issue.issue_id for issue in issues_of(run.records, "nonfinite")]
    assert len(set(ids)) == 2


def test_a_launcher_outlives_its_trainings() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    run.steps(range(3), loss=1.0)
    run.ended()
    run.incarnation, run.boot = "made-2", "boot"
    run.started()
    run.steps(range(3), loss=1.0)
    run.incarnation = "made-1"
    run.ended(role="launcher")
    view = view_of(run)
    assert (view.incarnation, view.state, view.exit_code) == ("made-2", "ended", 0)


def test_the_end_of_an_earlier_launcher_is_ignored() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.incarnation, run.boot = "made-2", "boot2"
    run.started(role="launcher")
    run.steps(range(3), loss=1.0)
    run.incarnation, run.boot = "made-1", "boot"
    run.ended(role="launcher")
    assert view_of(run).state == "running"


def test_without_a_launcher_the_last_rank_ends_the_run() -> None:
    run = RunBuilder(world_size=2)
    for rank in (0, 1):
        run.started(rank=rank)
    run.ended(rank=0)
    assert view_of(run).state == "running"
    run.ended(rank=1, outcome="failed")
    view = view_of(run)
    assert (view.state, view.outcome) == ("ended", "failed")


def test_the_view_tells_the_run() -> None:
    run = diverging()
    view = view_of(run)
    assert (view.last_step, view.world_size, view.issues) == (160, 1, 3)
    assert view.last_loss is not None
    assert math.isnan(view.last_loss)
    assert view.rules["nonfinite"] == "issues_found"
    assert view.rules["exploding_gradient"] == "in_progress"
    assert view.next_offset == len(run.records)
    run.ended(role="launcher", outcome="stopped")
    assert view_of(run).rules["exploding_gradient"] == "stopped"


def test_the_view_follows_a_stop() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    who: dict[str, Any] = {
        "run_id": "made",
        "incarnation": "made-1",
        "command_id": "c1",
        "issue_id": "i1",
    }
    run.event(StopAcknowledged(**who, step=7, leave_at=9))
    run.event(StopLeft(**who, step=9, edge="optimizer_step"))
    run.event(StopRefused(**{**who, "command_id": "c2"}, why="replayed"))
    run.event(StopExited(**who, role="launcher", how="edge", exit_code=79), role="launcher")
    stop = view_of(run).stop
    assert stop is not None
    assert (stop.state, stop.command_id, stop.issue_id) == ("exited", "c1", "i1")
    assert (stop.step, stop.how, stop.exit_code) == (9, "edge", 79)
    assert set(stop.states) == {"acknowledged", "left", "exited"}


def test_a_stop_that_is_confirmed_late_is_not_one_of_the_next_training() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    who: dict[str, Any] = {"run_id": "made", "incarnation": "made-1", "command_id": "c1"}
    run.event(StopLeft(**who, step=9, edge="optimizer_step"))
    # The script has caught it, and trains again; only then its launcher sees the training gone.
    run.incarnation = "made-2"
    run.started()
    run.event(StopExited(**who, role="launcher", how="edge", exit_code=79), role="launcher")
    view = view_of(run)
    assert (view.incarnation, view.stop) == ("made-2", None)


def test_a_beginning_a_stop_or_an_end_asks_for_a_checkpoint() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.steps(range(3), loss=1.0)
    engine, state = fed(run)
    assert state.urgent
    state.urgent = False
    run.steps([3], loss=1.0)
    engine.apply(run.records[-1])
    assert not state.urgent
    run.ended(role="launcher")
    engine.apply(run.records[-1])
    assert state.urgent


def test_an_issue_goes_on_at_most_once_in_its_repeat() -> None:
    run = RunBuilder(step_ms=60_000)
    run.steps(range(35), loss=NAN)
    states = [issue.state for issue in issues_of(run.records, "nonfinite")]
    assert states == ["firing", "ongoing", "ongoing", "ongoing"]


def test_time_never_goes_back() -> None:
    run = RunBuilder()
    run.steps(range(3), loss=1.0)
    run.wait(-3600)
    run.steps([3], loss=NAN)
    issue = assert_fires(run.records, "nonfinite")
    assert issue.at_ms == max(record.append_ms for record in run.records)


def test_ever_new_columns_do_not_fill_the_memory() -> None:
    engine = PartitionEngine(only("nonfinite"))
    run = RunBuilder()
    run.started()
    for step in range(MAX_KINDS + 5):
        run.steps([step], columns={"loss": 1.0, f"log.value_{step}": 1.0})
    run.steps([MAX_KINDS + 5], loss=math.nan)
    told = [one for record in run.records for one in engine.apply(record)]
    state = engine.run(run.run_id)
    assert state is not None
    assert len(state._listeners) < MAX_KINDS
    assert told


def test_labels_decide_which_instances_watch() -> None:
    run = RunBuilder(labels={"env": "prod"})
    run.started()
    run.steps([0], loss=NAN)
    here = [replace(spec, match={"env": ("pr*",)}) for spec in only("nonfinite")]
    elsewhere = [replace(spec, match={"env": ("dev",)}) for spec in only("nonfinite")]
    assert len(issues_of(run.records, specs=here)) == 1
    assert issues_of(run.records, specs=elsewhere) == []


def test_runs_of_one_partition_do_not_mix() -> None:
    a, b = RunBuilder("a"), RunBuilder("b")
    for run, loss in ((a, 1.0), (b, NAN)):
        run.steps([0], loss=loss)
    records = [replace(b.records[0], partition=a.records[0].partition), *a.records]
    assert [issue.run_id for issue in issues_of(records)] == ["b"]


def bad_records(good: Record) -> list[tuple[Record, type[RecordError]]]:
    other = RunBuilder("other")
    other.steps([0], loss=1.0)
    headers = dict(good.headers)
    return [
        (replace(good, value=b"\x00"), MalformedRecord),
        (replace(good, headers=()), MalformedRecord),
        (replace(good, key=b"\xff"), MalformedRecord),
        (replace(good, value=other.records[0].value), MalformedRecord),
        (
            replace(good, headers=tuple({**headers, "tocsin-version": b"9"}.items())),
            UnknownRecord,
        ),
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_bad_record_is_refused_and_the_next_is_taken(which: int) -> None:
    run = RunBuilder()
    run.steps([0, 1], loss=1.0)
    bad, error = bad_records(run.records[1])[which]
    engine = PartitionEngine(rule_specs())
    engine.apply(run.records[0])
    with pytest.raises(UnusableRecord) as caught:
        engine.apply(bad)
    assert isinstance(caught.value.error, error)
    run.steps([2], loss=NAN)
    assert len(engine.apply(run.records[-1])) == 1


def test_a_bug_sets_one_record_aside_and_the_next_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunBuilder()
    run.steps([0], loss=1.0)
    run.steps([1], loss=NAN)
    engine = PartitionEngine(only("nonfinite"))

    def fail(*_: object) -> None:
        raise KeyError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(RunState, "learn", fail)
        with pytest.raises(UnusableRecord, match="KeyError"):
            engine.apply(run.records[0])
    assert len(engine.apply(run.records[1])) == 1


def test_issues_of_timers_are_not_lost_with_a_bad_record() -> None:
    run = RunBuilder()
    run.started()
    engine = PartitionEngine(only("telemetry_lost"))
    engine.apply(run.records[0])
    late = replace(run.records[0], append_ms=run.now_ms + 100_000, value=b"", offset=1)
    with pytest.raises(UnusableRecord) as caught:
        engine.apply(late)
    assert [one.issue.rule for one in caught.value.reported] == ["telemetry_lost"]


def test_state_may_go_a_day_after_the_end() -> None:
    run = RunBuilder()
    run.started()
    run.ended()
    engine, state = fed(run)
    partition = run.records[0].partition.number
    engine.tick(partition, run.now_ms + KEEP_MS - 1, since_ms=0)
    assert not state.expired
    engine.tick(partition, run.now_ms + KEEP_MS, since_ms=0)
    assert state.expired
    assert engine.next_due_ms() is None


@pytest.mark.parametrize("agreed", ["node-0", "node-1"])
def test_ranks_of_several_nodes_are_in_the_incarnation_of_one_of_their_launchers(
    agreed: str,
) -> None:
    run = RunBuilder(world_size=2)
    for node in ("node-0", "node-1"):
        run.incarnation, run.boot = node, node
        run.started(role="launcher")
    run.incarnation, run.boot = agreed, "ranks"
    for rank in (0, 1):
        run.started(rank=rank)
    for step in range(20):
        for rank in (0, 1):
            run.steps([step], rank=rank, loss=1.0)
    view = view_of(run)
    assert (view.incarnation, view.last_step, len(view.ranks)) == (agreed, 19, 2)
    _, engine = fed(run)
    assert engine.state.late == 0
    # And when they train once more, what is said of the first training is late.
    run.incarnation = "second"
    run.started()
    run.incarnation = agreed
    run.steps([20], rank=1, loss=1.0)
    assert view_of(run).incarnation == "second"


def test_new_rules_are_those_of_the_next_incarnation_and_of_new_runs() -> None:
    run = RunBuilder()
    run.steps([0, 1], loss=1.0)
    first = len(run.records)
    run.steps([2], loss=NAN)
    run.incarnation, run.boot = "made-2", "boot2"
    run.steps([3], loss=NAN)
    engine = PartitionEngine(rule_specs())
    reported = [one for record in run.records[:first] for one in engine.apply(record)]
    entry = RuleEntry(name="nonfinite", use="nonfinite", severity="info")

    engine.use(rule_specs([entry]))
    reported += [one for record in run.records[first:] for one in engine.apply(record)]

    found = [one.issue for one in reported if one.issue.rule == "nonfinite"]
    assert [(issue.incarnation, issue.severity) for issue in found] == [
        ("made-1", "critical"),
        ("made-2", "info"),
    ]


def test_rules_that_need_a_start_stay_as_they_are() -> None:
    old = Config.model_validate(
        {
            "rules": (
                RuleEntry(name="twin", use="differs_from_run", params={"other_run": "run-a"}),
                RuleEntry(name="a", use="x.py:A"),
            )
        }
    )
    mine = RuleSpec(name="a", rule=NONFINITE, params=NONFINITE.meta.params(), custom=True)
    running = rule_specs(old.rules, customs={"a": mine})
    entries = (
        RuleEntry(name="twin", use="differs_from_run", params={"other_run": "run-b"}),
        RuleEntry(name="a", use="x.py:A", params={"k": 1}),
        RuleEntry(name="b", use="x.py:B"),
        RuleEntry(name="nonfinite", use="nonfinite", off=True),
    )

    specs, later = specs_at_runtime(running, old, Config.model_validate({"rules": entries}))
    same, nothing = specs_at_runtime(running, old, old)

    by_name = {spec.name: spec for spec in specs}
    assert later == ("a", "b", "twin")
    assert list(by_name["twin"].build().other_runs()) == ["run-a"]
    assert (by_name["a"].rule, by_name["a"].custom) == (mine.rule, True)
    assert not {"b", "nonfinite"} & set(by_name)
    assert ({spec.name for spec in same}, nothing) == ({spec.name for spec in running}, ())


def test_a_view_counts_what_is_missing_of_its_records_and_ranks() -> None:
    run = RunBuilder("made", world_size=5)
    for rank in range(4):
        run.started(rank=rank)
    run.steps(range(100), rank=0, loss=1.0)
    run.steps(range(30), rank=1, loss=1.0)
    run.steps(range(100), rank=2, loss=1.0)
    run.lose(rank=2, records=3)
    run.steps(range(100, 102), rank=2, loss=1.0)
    run.again(run.records[-1])

    assert view_of(run).telemetry == TelemetryCounts(
        records_missing=3, records_repeated=1, ranks_missing=1, ranks_late=1
    )
