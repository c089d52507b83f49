"""`stalled_training` and `telemetry_lost`: conclusions from what does not come."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.stops.commands import StopLeft
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.run_view import run_view
from tocsin.stream_rules.testing import (
    START_MS,
    RunBuilder,
    assert_fires,
    assert_quiet,
    issues_of,
    only,
)

STALLED = only("stalled_training")
FIVE_SECONDS = only("stalled_training", threshold="5s")
LOST = only("telemetry_lost")


def training(steps: int = 50, *, world_size: int = 1) -> RunBuilder:
    run = RunBuilder(world_size=world_size)
    for rank in range(world_size):
        run.started(rank=rank)
        run.steps(range(steps), rank=rank, loss=1.0, step_time_s=0.1)
    return run


def beat(run: RunBuilder, seconds: int, **more: int | str) -> None:
    for _ in range(seconds // 10):
        run.wait(10)
        for rank in range(run.world_size):
            run.heartbeat(rank=rank, last_step=49, **more)  # type: ignore[arg-type]


# -- stalled_training


def test_heartbeats_without_steps_are_a_stall() -> None:
    run = training()
    last_ms = run.now_ms
    beat(run, 320)
    issue = assert_fires(run.records, "stalled_training", specs=STALLED)
    assert issue.onset_ms == last_ms
    assert issue.at_ms == last_ms + 300_000
    assert (issue.first_step, issue.stop_worthy) == (50, False)


def test_a_rank_that_has_left_for_a_stop_stalls_no_more() -> None:
    run = training()
    left = StopLeft(
        run_id="made", incarnation="made-1", command_id="c1", step=49, edge="optimizer_step"
    )
    run.event(left)
    beat(run, 600)
    assert_quiet(run.records, specs=STALLED)


def test_a_threshold_can_be_given() -> None:
    run = training()
    run.wait(4)
    run.heartbeat(last_step=49)
    run.wait(2)
    run.heartbeat(last_step=49)
    issue = assert_fires(run.records, "stalled_training", specs=FIVE_SECONDS)
    assert issue.at_ms == run.now_ms - 1000


def test_slow_steps_have_a_longer_threshold() -> None:
    run = RunBuilder(step_ms=60_000)
    run.started()
    run.steps(range(10), loss=1.0, step_time_s=60.0)
    beat(run, 1100)
    assert_quiet(run.records, specs=STALLED)
    beat(run, 200)
    assert_fires(run.records, "stalled_training", specs=STALLED)


def test_forward_calls_are_progress() -> None:
    run = training()
    for calls in range(100):
        run.wait(10)
        run.heartbeat(last_step=49, forward_calls=calls + 1)
    assert_quiet(run.records, specs=STALLED)


def test_a_phase_that_goes_on_is_progress() -> None:
    run = training()
    run.phase("checkpoint", "begin")
    beat(run, 900, busy="checkpoint")
    assert_quiet(run.records, specs=STALLED)


@pytest.mark.parametrize(
    ("done", "severity"), [(50, "info"), (49, "critical"), (51, "critical"), (None, "critical")]
)
def test_after_the_last_planned_step_none_has_to_follow(done: int | None, severity: str) -> None:
    run = training()
    if done is not None:
        run.event(
            TrainingPlanned(
                run_id="made", incarnation="made-1", total_steps=100, done_steps=done, source="loop"
            )
        )
    beat(run, 320)
    issue = assert_fires(run.records, "stalled_training", specs=STALLED)
    assert issue.severity == severity
    assert ("the last of 100 planned ones" in issue.reason) == (severity == "info")


def test_without_heartbeats_nothing_is_known_of_the_steps() -> None:
    run = training()
    assert issues_of(run.records, specs=STALLED, until_ms=run.now_ms + 3_600_000) == []


def test_heartbeats_that_come_back_without_steps_show_the_stall() -> None:
    run = training()
    run.wait(400)
    beat(run, 20)
    assert_quiet(run.records, specs=STALLED)
    beat(run, 10)
    assert_fires(run.records, "stalled_training", specs=STALLED)


def test_a_job_that_was_suspended_and_goes_on_has_not_stalled() -> None:
    for pause_s in (290, 400):
        run = training()
        beat(run, 10)
        run.wait(pause_s)
        run.heartbeat(last_step=49)
        run.wait(15)
        run.steps(range(50, 60), loss=1.0, step_time_s=0.1)
        beat(run, 100)
        assert_quiet(run.records, specs=STALLED)


def test_before_the_first_step_nothing_is_said() -> None:
    run = RunBuilder()
    run.started()
    beat(run, 900)
    assert_quiet(run.records, specs=STALLED)


def test_a_run_that_has_ended_does_not_stall() -> None:
    run = training()
    run.ended()
    beat(run, 900)
    assert_quiet(run.records, specs=STALLED)


def test_a_stall_that_ends_is_resolved_and_the_next_is_the_same_issue_again() -> None:
    run = training()
    beat(run, 320)
    run.steps(range(50, 60), loss=1.0)
    beat(run, 320)
    issues = issues_of(run.records, specs=STALLED)
    assert [i.state for i in issues] == ["firing", "resolved", "firing"]
    assert issues[0].issue_id == issues[2].issue_id
    assert [i.times for i in issues] == [1, 1, 2]


def test_the_rank_that_is_behind_is_named() -> None:
    run = training(world_size=2)
    run.steps([50], rank=1, loss=1.0)
    beat(run, 320)
    issue = assert_fires(run.records, "stalled_training", specs=STALLED)
    assert issue.first_rank == 0


# -- telemetry_lost


def test_silence_of_a_rank_is_reported() -> None:
    run = training(world_size=2)
    for _ in range(10):
        run.wait(10)
        run.heartbeat(rank=0)
    issue = assert_fires(run.records, "telemetry_lost", specs=LOST)
    assert (issue.subject.name, issue.first_rank, issue.stop_worthy) == ("rank 1", 1, False)
    assert issue.severity == "warning"


def test_a_heartbeat_after_the_end_of_a_rank_means_nothing() -> None:
    run = training(world_size=2)
    run.ended(rank=1)
    run.heartbeat(rank=1)
    for _ in range(10):
        run.wait(10)
        run.heartbeat(rank=0)
    assert_quiet(run.records, specs=LOST)


def test_a_rank_that_is_heard_again_resolves_it() -> None:
    run = training()
    run.wait(100)
    run.heartbeat()
    issues = issues_of(run.records, specs=LOST)
    assert [i.state for i in issues] == ["firing", "resolved"]


def test_a_thousand_silent_ranks_are_one_issue() -> None:
    run = RunBuilder(world_size=1000)
    for rank in range(1000):
        run.heartbeat(rank=rank)
    issue = assert_fires(run.records, "telemetry_lost", specs=LOST, until_ms=run.now_ms + 120_000)
    assert issue.evidence.followed == 999


def test_ranks_that_have_ended_are_not_missed() -> None:
    run = training(world_size=2)
    run.ended(rank=1)
    for _ in range(10):
        run.wait(10)
        run.heartbeat(rank=0)
    run.ended(rank=0)
    assert_quiet(run.records, specs=LOST, until_ms=run.now_ms + 3_600_000)


def test_a_job_without_torch_is_not_missed() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.wait(30)
    run.heartbeat(role="launcher")
    run.wait(3600)
    run.ended(role="launcher")
    assert_quiet(run.records)


# -- live: only where it is sure that nothing is waiting to be read


def test_a_live_worker_must_have_been_without_lag_for_as_long_as_the_threshold() -> None:
    run = RunBuilder()
    run.started()
    engine = PartitionEngine(LOST)
    engine.apply(run.records[0])
    partition = run.records[0].partition.number
    due = run.now_ms + 60_000
    assert engine.next_due_ms() == due
    assert engine.tick(partition, due, since_ms=due) == []
    assert engine.next_due_ms() == due + 60_000
    assert engine.tick(partition, due + 59_999, since_ms=due) == []
    told = engine.tick(partition, due + 60_000, since_ms=due)
    assert [one.issue.rule for one in told] == ["telemetry_lost"]


def back_after(silence_s: float, *, silent: int | None = None) -> list[str]:
    """What is told live when the bus was away for so long, and one rank does not come back."""
    run = training(world_size=2)
    engine = PartitionEngine(LOST)
    told = [one for record in run.records for one in engine.apply(record)]
    run.wait(silence_s)
    for i in range(14):
        before = len(run.records)
        for rank in {0, 1} - {silent}:
            run.heartbeat(rank=rank)
        for record in run.records[before:]:
            told += engine.apply(record, was_away=i == 0)
        run.wait(10)
    return [one.issue.subject.name for one in told]


def test_a_bus_that_was_away_is_no_lost_rank() -> None:
    assert back_after(600) == []
    assert back_after(600, silent=1) == ["rank 1"]


def test_the_bus_is_back_with_the_first_record_that_was_appended_after_the_outage() -> None:
    """Those that are read first may have been appended before it."""
    run = training(world_size=2)
    before = len(run.records)
    run.wait(600)
    for _ in range(3):
        for rank in range(2):
            run.heartbeat(rank=rank)
        run.wait(10)
    engine = PartitionEngine(LOST)
    told = []
    for i, record in enumerate(run.records):
        told += engine.apply(record, was_away=i == before - 1)
    assert told == []


def test_live_and_replayed_it_is_the_same_episode() -> None:
    run = training()
    engine = PartitionEngine(LOST)
    for record in run.records:
        engine.apply(record)
    live = engine.tick(run.records[0].partition.number, run.now_ms + 70_000, since_ms=0)
    run.wait(300)
    run.heartbeat()
    replayed = issues_of(run.records, specs=LOST)
    assert [one.issue.issue_id for one in live] == [replayed[0].issue_id]


def view_of(run: RunBuilder, until_ms: int) -> RunView:
    engine = PartitionEngine(rule_specs())
    for record in run.records:
        engine.apply(record)
    engine.tick(run.records[0].partition.number, until_ms, since_ms=0)
    state = engine.run(run.run_id)
    assert state is not None
    return run_view(state, next_offset=0)


def test_a_run_of_which_nothing_is_heard_is_lost() -> None:
    run = training()
    assert view_of(run, run.now_ms + 59_999).state == "running"
    assert view_of(run, run.now_ms + 60_000).state == "lost"


def test_a_run_whose_ranks_have_ended_and_whose_launcher_is_gone_has_ended() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    run.steps(range(5), loss=1.0)
    run.ended(outcome="failed")
    assert view_of(run, run.now_ms + 1).state == "running"
    view = view_of(run, run.now_ms + 60_000)
    assert (view.state, view.outcome) == ("ended", "failed")


def test_thresholds_are_durations() -> None:
    assert FIVE_SECONDS[0].params.model_dump() == {"threshold": timedelta(seconds=5)}
    assert START_MS > 0
