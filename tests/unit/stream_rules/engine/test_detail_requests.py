"""When a run is asked to capture more: once per finding in its numbers, not often, live only."""

from __future__ import annotations

import math

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.stops.commands import DetailRequest
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.detail_requests import (
    DETAIL_INTERVAL_MS,
    DETAIL_STEPS,
    DETAIL_WITHIN_MS,
)
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.engine.run import KEEP_MS
from tocsin.stream_rules.service import RulesService, build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()
CONTROL = Partition(TOPICS.control, issue_partition("made"))


def bad_again_and_again(*, gaps_s: list[float]) -> RunBuilder:
    """A NaN, then after each gap good steps, 60 and each time thrice as many, and another NaN."""
    run = RunBuilder()
    run.started()
    run.steps(range(5), loss=1.0)
    run.steps([5], loss=math.nan)
    step, good = 6, 60
    for gap_s in gaps_s:
        run.steps(range(step, step + good), loss=1.0)
        run.wait(gap_s)
        run.steps([step + good], loss=math.nan)
        step, good = step + good + 1, 3 * good
    return run


def looks_of(run: RunBuilder) -> list[DetailRequest]:
    specs = [s for s in rule_specs() if s.name == "nonfinite"]
    return [told.request for told in replay(run.records, specs) if told.request is not None]


def tick(run: RunBuilder) -> Tick:
    return Tick(run.now_ms, frozenset({run.records[0].partition.number}))


def service() -> RulesService:
    rules = build_rules_service(TOPICS)
    rules.attached(Attachment(lambda: None))
    return rules


def test_a_finding_asks_for_more_of_the_training_that_it_is_of() -> None:
    run = bad_again_and_again(gaps_s=[])
    (told,) = replay(run.records)
    look = told.request
    assert look is not None
    assert (look.run_id, look.incarnation) == ("made", "made-1")
    assert (look.rule, look.issue_id) == ("nonfinite", told.issue.issue_id)
    assert look.steps == DETAIL_STEPS == 50
    assert look.not_after_ms == told.issue.at_ms + DETAIL_WITHIN_MS


def test_a_run_is_asked_at_most_once_in_ten_minutes_of_record_time() -> None:
    near = bad_again_and_again(gaps_s=[60, 300])
    assert len(replay(near.records)) > 2
    assert len(looks_of(near)) == 1
    far = bad_again_and_again(gaps_s=[60, DETAIL_INTERVAL_MS / 1000])
    first, second = looks_of(far)
    assert second.not_after_ms - first.not_after_ms >= DETAIL_INTERVAL_MS


def test_another_training_of_the_run_does_not_begin_to_count_anew() -> None:
    run = bad_again_and_again(gaps_s=[])
    run.incarnation, run.boot = "made-2", "other"
    run.started()
    run.steps(range(5), loss=1.0)
    run.steps([5], loss=math.nan)
    told = replay(run.records)
    assert {t.issue.incarnation for t in told} == {"made-1", "made-2"}
    assert len(looks_of(run)) == 1


def test_what_is_no_warning_or_not_about_numbers_asks_for_nothing() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(50), loss=1.0)
    run.lose(records=20)
    run.steps(range(70, 75), loss=1.0)
    run.wait(120)
    run.steps(range(75, 80), loss=1.0)
    lost = [t for t in replay(run.records) if t.issue.rule == "telemetry_lost"]
    assert lost
    assert [t.request for t in lost] == [None] * len(lost)


def test_when_it_was_asked_is_part_of_the_state() -> None:
    run = bad_again_and_again(gaps_s=[60])
    middle = len(run.records) // 2
    whole = looks_of(run)
    assert len(whole) == 1
    specs = rule_specs()
    first = PartitionEngine(specs)
    told = [t for record in run.records[:middle] for t in first.apply(record)]
    saved = first.run("made").snapshots(  # type: ignore[union-attr]
        next_offset=middle, clock_ms=run.records[middle - 1].append_ms, software=""
    )
    second = PartitionEngine(specs)
    second.adopt(
        run.records[0].partition.number, "made", {s.rule: s for s in saved}, next_offset=middle
    )
    told += [t for record in run.records[middle:] for t in second.apply(record)]
    assert [t.request for t in told if t.request is not None] == whole


def test_the_service_writes_it_unsigned_to_the_runs_control_partition_behind_the_issue() -> None:
    run = bad_again_and_again(gaps_s=[])
    rules = service()
    rules.apply(run.records, tick(run))
    issue, look = rules.outputs()
    assert issue.partition.topic == TOPICS.issues
    assert (look.partition, look.key) == (CONTROL, b"made/look_closer")
    assert not [name for name, _ in look.headers if "signature" in name]
    assert look.value is not None
    event = decode(read_meta(look.headers), look.value)
    assert isinstance(event, Event)
    assert isinstance(event.data, DetailRequest)
    assert event.data.key == "made/look_closer"
    # The same records once more, as after a crash, give the same bytes.
    again = service()
    again.apply(run.records, tick(run))
    assert again.outputs()[1] == look


def test_it_goes_with_the_runs_state() -> None:
    run = bad_again_and_again(gaps_s=[])
    run.ended()
    rules = service()
    rules.apply(run.records, tick(run))
    rules.snapshots(force=True)
    other = RunBuilder("other", incarnation="o")
    later = run.now_ms + KEEP_MS + 1
    number = run.records[0].partition.number
    other.now_ms = later
    other.started()
    record = other.records[0]
    moved = Record(
        Partition(TOPICS.telemetry, number), 999, later, record.key, record.value, record.headers
    )
    rules.apply([moved], Tick(later, frozenset({number})))
    gone = [o for o in rules.snapshots(force=True) if o.value is None]
    assert Outgoing(CONTROL, b"made/look_closer", None) in gone
