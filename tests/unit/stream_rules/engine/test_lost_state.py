"""`cold_start` and `telemetry_gap`: what was lost on the way, and what it does to stops."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from support.rules.restarts import told_with_restarts
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import CaptureFigures, Heartbeat
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.engine.run import RUN_KEY
from tocsin.stream_rules.testing import RunBuilder, assert_quiet, issues_of, only

NAMES = ("cold_start", "loss_diverged", "nonfinite")
SPECS = rule_specs([RuleEntry(name=n, use=n) for n in NAMES], defaults="none")
GAP = only("telemetry_gap")


def saved_at(run: RunBuilder, at: int, specs: Sequence[RuleSpec] = SPECS) -> dict[str, Snapshot]:
    """What is saved of the run after so many records."""
    engine = PartitionEngine(specs)
    for record in run.records[:at]:
        engine.apply(record)
    known = engine.run("made")
    assert known is not None
    clock_ms = run.records[at - 1].append_ms
    snapshots = known.snapshots(next_offset=at, clock_ms=clock_ms, software="")
    return {one.rule: Snapshot.decode(one.encode()) for one in snapshots}


def after(run: RunBuilder, at: int, saved: Mapping[str, Snapshot]) -> list[IssueFiring]:
    """What a worker says that goes on from there, all states."""
    engine = PartitionEngine(SPECS)
    if saved:
        engine.adopt(run.records[0].partition.number, "made", saved, next_offset=at)
    return [told.issue for record in run.records[at:] for told in engine.apply(record)]


def diverging(*, steps_after: int = 400) -> tuple[RunBuilder, int]:
    """A loss that is well for 100 steps and a hundred times too high from step 160 on."""
    run = RunBuilder()
    run.started()
    run.steps(range(100), loss=1.0)
    at = len(run.records)
    run.steps(range(100, 160), loss=1.0)
    run.steps(range(160, 160 + steps_after), loss=500.0)
    return run, at


def told_of(issues: Sequence[IssueFiring], rule: str) -> list[IssueFiring]:
    return [one for one in issues if one.rule == rule]


@pytest.mark.parametrize("how", ["unreadable", "other version"])
def test_a_lost_state_is_said_and_stops_are_held_back_until_enough_was_seen(how: str) -> None:
    run, at = diverging()
    saved = saved_at(run, at)
    broken = saved["loss_diverged"]
    saved["loss_diverged"] = (
        replace(broken, payload=b"\xff" * 40)
        if how == "unreadable"
        else replace(broken, rule_version=99)
    )
    issues = after(run, at, saved)
    (said, over) = told_of(issues, "cold_start")
    assert (said.severity, said.subject.name) == ("warning", "loss_diverged")
    assert (over.state, over.step) == ("resolved", 300)
    first, *later = told_of(issues, "loss_diverged")
    assert first.first_step == 160
    assert first.stop_held
    (critical, *_) = [one for one in later if one.severity == "critical"]
    assert critical.stop_worthy
    assert critical.stop_held
    released = [one for one in later if not one.stop_held]
    assert released[0].state == "ongoing"
    assert released[0].step == 300
    assert released[0].model_dump()["stop_released"] is True
    assert not released[0].turned_critical


def test_with_its_state_nothing_is_held_back() -> None:
    run, at = diverging()
    issues = after(run, at, saved_at(run, at))
    assert told_of(issues, "cold_start") == []
    assert not any(one.stop_held for one in issues)


def test_a_lost_state_of_the_run_and_workers_that_begin_late_are_an_info() -> None:
    run, at = diverging()
    saved = saved_at(run, at)
    del saved[RUN_KEY]
    for known in (saved, {}):
        issues = after(run, at, known)
        said = told_of(issues, "cold_start")[0]
        assert (said.severity, said.state) == ("info", "firing")
        assert "under way" in said.reason
        assert not any(one.stop_worthy and not one.stop_held for one in issues)


def test_a_rule_that_was_not_there_before_has_no_memory_either() -> None:
    run, at = diverging()
    saved = saved_at(run, at, only("nonfinite"))
    issues = after(run, at, saved)
    assert told_of(issues, "cold_start")[0].severity == "info"
    assert told_of(issues, "loss_diverged")[0].stop_held


def test_what_is_certain_without_a_past_is_never_held_back() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(50), loss=1.0)
    run.steps([50], loss=float("nan"))
    (issue,) = told_of(after(run, 30, {}), "nonfinite")
    assert (issue.stop_worthy, issue.stop_held) == (True, False)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_state_from_before_an_upgrade_keeps_the_stop(optimizers: int) -> None:
    run = RunBuilder()
    run.started(optimizers=optimizers)
    run.steps(range(200), loss=1.0)
    at = len(run.records)
    run.steps(range(200, 400), loss=500.0)
    saved = saved_at(run, at)
    known = json.loads(saved[RUN_KEY].payload)
    for later in ("trains", "losses", "parts"):  # the fields that came with later versions
        del known[later]
    saved[RUN_KEY] = replace(saved[RUN_KEY], payload=json.dumps(known).encode())
    diverged = told_of(after(run, at, saved), "loss_diverged")
    assert any(one.stop_worthy and not one.stop_held for one in diverged) is (optimizers == 1)


def test_it_is_told_once_and_held_back_over_another_restart() -> None:
    run, at = diverging()
    number = run.records[0].partition.number
    saved = saved_at(run, at)
    del saved["loss_diverged"]
    engine = PartitionEngine(SPECS)
    engine.adopt(number, "made", saved, next_offset=at)
    issues = [told.issue for one in run.records[at : at + 21] for told in engine.apply(one)]
    known = engine.run("made")
    assert known is not None
    again = known.snapshots(next_offset=at + 21, clock_ms=run.now_ms, software="")
    engine = PartitionEngine(SPECS)
    engine.adopt(number, "made", {one.rule: one for one in again}, next_offset=at + 21)
    issues += [told.issue for one in run.records[at + 21 :] for told in engine.apply(one)]
    assert [one.state for one in told_of(issues, "cold_start")] == ["firing", "resolved"]
    assert told_of(issues, "loss_diverged")[0].stop_held


def test_a_training_after_another_in_one_process_is_no_cold_start() -> None:
    run = RunBuilder()
    for incarnation in ("made-1", "made-2"):
        run.incarnation = incarnation
        run.started()
        run.steps(range(30), loss=1.0)
        run.ended()
    assert issues_of(run.records, "cold_start", specs=SPECS) == []


# -- telemetry_gap


def beat(run: RunBuilder, *, records: int, dropped: int, rank: int = 0) -> None:
    figures = CaptureFigures(overhead_percent=0.1, records=records, dropped=dropped)
    run.event(
        Heartbeat(
            run_id=run.run_id,
            incarnation=run.incarnation,
            rank=rank,
            world_size=run.world_size,
            capture=figures,
        ),
        rank=rank,
    )
    run.wait(10)


def gaps(run: RunBuilder) -> list[tuple[str, str, str]]:
    issues = issues_of(run.records, specs=GAP)
    return [(i.branch, i.severity, i.state) for i in issues]


def test_a_few_lost_records_are_an_info_that_is_over_after_a_while() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(1000), loss=1.0)
    run.lose(records=3)
    for _ in range(10):
        beat(run, records=1000, dropped=0)
    assert gaps(run) == [("missing", "info", "firing"), ("missing", "info", "resolved")]
    (issue, _) = issues_of(run.records, specs=GAP)
    assert "3 records have not arrived" in issue.reason
    assert issue.first_step == 999


def test_many_dropped_records_are_a_warning() -> None:
    run = RunBuilder(world_size=2)
    for rank in (0, 1):
        run.started(rank=rank)
    beat(run, records=100, dropped=0)
    beat(run, records=100, dropped=0, rank=1)
    beat(run, records=110, dropped=1, rank=1)
    beat(run, records=200, dropped=0)
    beat(run, records=120, dropped=300, rank=1)
    assert gaps(run) == [("dropped", "info", "firing"), ("dropped", "warning", "ongoing")]
    assert issues_of(run.records, specs=GAP)[0].first_rank == 1
    told = [one.issue.model_dump_json() for one in replay(run.records, GAP)]
    assert told_with_restarts(run.records, GAP, every=1) == told


def test_what_was_lost_before_anybody_looked_is_not_told() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(100), loss=1.0)
    beat(run, records=101, dropped=70)
    beat(run, records=102, dropped=70)
    run.records[:50] = []
    assert_quiet(run.records, specs=GAP)
    assert gaps(run) == []


def test_repeats_and_a_run_without_losses_are_no_gap() -> None:
    run = RunBuilder()
    run.started()
    for step in range(0, 100, 10):
        run.steps(range(step, step + 10), loss=1.0)
        run.again(run.records[-1])
        beat(run, records=10 + step, dropped=0)
    run.ended()
    assert gaps(run) == []
