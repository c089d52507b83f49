"""Telemetry as it was ever written is still used: each golden record through all rules.

`test_golden.py` shows that a record is read. Here something must come of it: the state of a rule
that is for it changes, or what is known of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import numpy as np
import pytest

from support.records.golden import APPEND_MS, RUN, golden_names, golden_records
from tocsin.bus.port import Record
from tocsin.runtime.service import Tick
from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.run import RunEngine
from tocsin.stream_rules.engine.run_state import RunState
from tocsin.stream_rules.rules.progress.loss_spike import LossSpike
from tocsin.stream_rules.service import RulesService

SPECS: Final = rule_specs()
STARTED: Final = "tocsin.run.started-v1"
ENDED: Final = "tocsin.run.ended-v1"
RELEASED: Final = "tocsin.rule.released-v1"

READ_BY: Final = {
    "steps-v1": {"nonfinite", "overfit", "stalled_training"},
    "system-v1": {"low_gpu_utilization", "cpu_bottleneck", "batch_size"},
    "tensors-v1": {"nonfinite", "all_zero", "unchanged_tensor", "telemetry_lost"},
    "tocsin.run.checkpoint-v1": {"checkpoint_stall", "checkpoint_unhealthy"},
    "tocsin.run.checkpoint_read-v1": {"checkpoint_unhealthy"},
    "tocsin.run.data_loader-v1": {"dataloader", "batch_size"},
    ENDED: {"stalled_training", "telemetry_lost", "telemetry_gap"},
    "tocsin.run.heartbeat-v1": {"stalled_training", "telemetry_lost", "telemetry_gap"},
    "tocsin.run.layer_inputs-v1": {"unnormalised_inputs"},
    "tocsin.run.loss_inputs-v1": {"loss_input_mismatch", "collapsed_predictions"},
    "tocsin.run.mode-v1": {"evaluation_in_train_mode"},
    "tocsin.run.phase-v1": {"stalled_training", "checkpoint_stall"},
}
"""Rules whose state each of these changes."""

KNOWN: Final[dict[str, tuple[Callable[[RunState], object], object]]] = {
    STARTED: (
        lambda run: (
            run.labels,
            run.node,
            run.world_size,
            run.optimizers,
            run.ranks[1].heartbeat_ms,
        ),
        ({"team": "vision", "name": "größe"}, "node-17", 2, 1, 10_000),
    ),
    "tocsin.run.checkpoint-v1": (
        lambda run: [(c.step, c.sound) for c in run.checkpoints],
        [(1000, True)],
    ),
    ENDED: (
        lambda run: (run.ended, run.outcome, run.exit_code),
        (True, "stopped", 79),
    ),
    "tocsin.run.heartbeat-v1": (
        lambda run: run.ranks[1].capture and run.ranks[1].capture.records,
        2411,
    ),
    "tocsin.run.optimizers-v1": (lambda run: run.losses, 1),
    "tocsin.run.planned-v1": (
        lambda run: (run.planned.total_steps, run.planned.done_steps),
        (10_000, 4_000),
    ),
    **{
        f"tocsin.stop.{kind}-v1": (lambda run: run.stop and run.stop.state, state)
        for kind, state in (
            ("acknowledged", "acknowledged"),
            ("checkpoint", "checkpoint_decided"),
            ("escalated", "escalated"),
            ("exited", "exited"),
            ("expired", "expired"),
            ("left", "left"),
            ("refused", "refused"),
        )
    },
}
"""What is known of the run afterwards."""

HEARD: Final = {
    "tocsin.run.capture_degraded-v1": 0,
    "tocsin.run.checkpoint_pinned-v1": 0,
    "tocsin.run.tensors_saved-v1": 1,
}
"""For others than rules: all that the engine takes from them is that this rank is there."""

ON_OTHER_TOPICS: Final = {
    "snapshot-v1",
    "tocsin.configuration.refused-v1",
    "tocsin.delivery-v1",
    "tocsin.digest-v1",
    "tocsin.feedback.acknowledged-v1",
    "tocsin.feedback.false_alarm-v1",
    "tocsin.feedback.resolved-v1",
    "tocsin.issue.firing-v1",
    "tocsin.issue.ongoing-v1",
    "tocsin.issue.resolved-v1",
    "tocsin.run.look_closer-v1",
    "tocsin.run.view-v1",
    "tocsin.silence.set-v1",
    "tocsin.stop.answered-v1",
    "tocsin.stop.requested-v1",
    "tocsin.stops.switched-v1",
}
"""Not telemetry."""

TELEMETRY: Final = sorted({*READ_BY, *KNOWN, *HEARD, RELEASED})


def after(records: Sequence[Record]) -> tuple[RunEngine, list[Reported]]:
    engine = PartitionEngine(SPECS)
    reported = [one for record in records for one in engine.apply(record)]
    run = engine.run(RUN)
    assert run is not None
    assert [one.spec.name for one in run.instances if one.failed] == []
    return run, reported


def states(run: RunEngine) -> dict[str, bytes]:
    saved = run.snapshots(next_offset=0, clock_ms=0, software="")
    return {one.rule: one.payload for one in saved}


def test_each_golden_record_has_its_place_here() -> None:
    assert set(TELEMETRY) | ON_OTHER_TOPICS == set(golden_names())
    assert not set(TELEMETRY) & ON_OTHER_TOPICS


@pytest.mark.parametrize("name", sorted(READ_BY))
def test_rules_read_it(name: str) -> None:
    before, _ = after(golden_records([STARTED]))
    run, _ = after(golden_records([STARTED, name]))
    old, new = states(before), states(run)
    assert {rule for rule in new if new[rule] != old[rule]} >= READ_BY[name]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_run_knows_it(name: str) -> None:
    fact, expected = KNOWN[name]
    before, _ = after(golden_records([STARTED] if name != STARTED else ["tocsin.run.phase-v1"]))
    run, _ = after(golden_records([STARTED, name]))
    assert fact(run.state) == expected
    if name != STARTED:
        assert fact(before.state) != expected


@pytest.mark.parametrize("name", sorted(HEARD))
def test_its_rank_is_heard(name: str) -> None:
    run, reported = after(golden_records([STARTED, name]))
    assert run.state.ranks[HEARD[name]].last_heard_ms == APPEND_MS + 1
    assert reported == []


def test_a_release_brings_the_rule_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> NoReturn:
        raise ValueError("a bug")

    engine = PartitionEngine(SPECS)
    started, release = golden_records([STARTED, RELEASED])
    engine.apply(started)
    run = engine.run(RUN)
    assert run is not None
    (spike,) = [one for one in run.instances if one.spec.name == "loss_spike"]
    with monkeypatch.context() as patched:
        patched.setattr(LossSpike, "on_steps", broken)
        engine.apply(losses(run.state.incarnation, offset=1))
    assert spike.failed
    engine.apply(
        Record(release.partition, 2, *(APPEND_MS + 2, release.key, release.value, release.headers))
    )
    assert not spike.failed
    (issue,) = [
        one.issue
        for one in engine.apply(losses(run.state.incarnation, offset=3))
        if one.issue.rule == "cold_start"
    ]
    assert "released from quarantine by ana@node-1" in issue.reason


def test_a_state_that_is_not_understood_any_more_keeps_no_rule_from_its_records() -> None:
    (state,), records = golden_records(["snapshot-v1"]), golden_records([STARTED, "steps-v1"])
    assert state.value is not None
    snapshot = Snapshot.decode(state.value)
    engine = PartitionEngine(SPECS)
    run = engine.adopt(state.partition.number, RUN, {snapshot.rule: snapshot}, next_offset=0)

    reported = [one.issue.reason for record in records for one in engine.apply(record)]

    assert reported == ["evaluation loss is NaN at step 1200", "accuracy is infinite at step 1200"]
    assert [one.spec.name for one in run.instances if one.failed] == []


def losses(incarnation: str, *, offset: int) -> Record:
    frame = StepFrame(
        origin=RecordOrigin(run_id=RUN, incarnation=incarnation, rank=1, world_size=2),
        steps=np.array([offset], np.uint64),
        at_us=np.array([(APPEND_MS + offset) * 1000], np.uint64),
        columns=("loss",),
        values=np.array([[1.0]], np.float32),
    )
    (like,) = golden_records([STARTED])
    headers = meta_of(frame, rank=1, boot="another", seq=offset).headers()
    return Record(like.partition, offset, APPEND_MS + offset, like.key, frame.encode(), headers)


def test_all_of_them_in_one_run_and_none_is_set_aside() -> None:
    middle = [name for name in TELEMETRY if name not in (STARTED, ENDED, RELEASED)]
    # Who releases a rule is no rank: it does not count among the records of one.
    records = golden_records([STARTED, *middle, ENDED, RELEASED])
    number = telemetry_partition(RUN)
    service = RulesService(Topics(), SPECS)
    service.restored(number, 0)

    poison = service.apply(records, Tick(APPEND_MS + len(records), frozenset({number})))
    issues, saved = service.outputs(), service.snapshots(force=True)

    assert poison == []
    assert issues
    run = service.engine.run(RUN)
    assert run is not None
    assert [one.spec.name for one in run.instances if one.failed] == []
    assert run.state.missing == run.state.duplicates == run.state.late == 0
    assert len(saved) > len(SPECS) / 2
