"""A rule that raises, takes too long or remembers too much is off for its run, until released."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from support.rules.made_rules import loss_rule
from support.waiting import HANGS_S
from tocsin.bus.port import Record
from tocsin.console.fleet.quarantines import release_record
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.instance import MAX_STATE_BYTES
from tocsin.stream_rules.engine.packing import MAX_UNPACKED, pack, unpack
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.engine.rule_times import CALL_LIMIT_S, RuleTimes
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.rule import Params, Rule
from tocsin.stream_rules.testing import RunBuilder


class Clock:
    """Of a machine on which a call takes as long as a test says."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0


CLOCK = Clock()
HUNG, RETURNS = threading.Event(), threading.Event()


@dataclass(slots=True)
class FaultyState:
    steps: list[int] = field(default_factory=list)
    ballast: str = ""


class FaultyParams(Params):
    pass


class Faulty(Rule[FaultyParams, FaultyState]):
    """Does at step 3 what the loss of that step says."""

    meta = loss_rule("faulty", FaultyParams, history_steps=2)
    state_type = FaultyState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        losses = frame.column("loss")
        assert losses is not None
        what = int(losses[-1])
        self.state.steps += [int(step) for step in frame.steps]
        if what == 2:
            raise ValueError("a bug")
        if what == 3:
            CLOCK.wall_s += 2 * CALL_LIMIT_S
            CLOCK.cpu_s += 2 * CALL_LIMIT_S
        if what == 4:
            CLOCK.wall_s += 2 * CALL_LIMIT_S
        if what == 6:
            HUNG.set()
            RETURNS.wait()
        if what == 5:
            self.state.ballast = random.Random(1).randbytes(MAX_STATE_BYTES).hex()
        return ()


def engine() -> PartitionEngine:
    spec = RuleSpec(name="faulty", rule=Faulty, params=FaultyParams())
    times = RuleTimes(lambda: CLOCK.wall_s, lambda: CLOCK.cpu_s)
    times.round()
    return PartitionEngine([*rule_specs(), spec], times)


def going(loss: float, steps: int = 3) -> RunBuilder:
    run = RunBuilder()
    run.started()
    run.steps(range(steps), loss=1.0)
    run.steps([steps], loss=loss)
    return run


def state_of(engine: PartitionEngine) -> tuple[bool, Faulty]:
    run = engine.run("made")
    assert run is not None
    (instance,) = [one for one in run.instances if one.spec.name == "faulty"]
    assert isinstance(instance.rule, Faulty)
    return instance.failed, instance.rule


def reasons(reported: Iterable[Reported]) -> list[str]:
    return [one.issue.reason for one in reported if one.issue.use == "rule_failed"]


def fed(engine: PartitionEngine, records: Iterable[Record]) -> list[str]:
    return [why for record in records for why in reasons(engine.apply(record))]


@pytest.mark.parametrize(
    ("loss", "why"),
    [(2.0, "ValueError: a bug"), (3.0, "20.0 s of CPU time"), (5.0, "more than 2,0")],
    ids=["raises", "takes too long", "remembers too much"],
)
def test_it_is_off_and_the_other_rules_go_on(loss: float, why: str) -> None:
    rules, run = engine(), going(loss)
    said = fed(rules, run.records)
    (number,) = {record.partition.number for record in run.records}
    one = rules.run("made")
    assert one is not None
    one.snapshots(next_offset=9, clock_ms=run.now_ms, software="")
    said += reasons(rules.tick(number, run.now_ms, since_ms=0))
    at = len(run.records)
    run.steps([4, 5], loss=float("nan"))
    said += fed(rules, run.records[at:])

    assert len(said) == 1
    assert why in said[0]
    assert state_of(rules)[0]
    assert not any(i.failed for i in one.instances if i.spec.name != "faulty")
    assert [i.spec.name for i in one.instances if i.found and i.spec.name == "nonfinite"]


def test_one_that_never_returns_is_off_wherever_its_state_is_taken_up() -> None:
    hung, run = engine(), going(6.0)
    thread = threading.Thread(target=fed, args=(hung, run.records))
    thread.start()
    try:
        assert HUNG.wait(HANGS_S)
        call = hung.call_under_way()
        assert call is not None
        abandoned = hung.abandon(call, "test")
    finally:
        RETURNS.set()
        thread.join()

    assert abandoned is not None
    number, snapshot = abandoned
    next_one = engine()
    next_one.adopt(number, "made", {snapshot.rule: snapshot}, next_offset=0)
    why = fed(next_one, run.records)
    assert len(why) == 1
    assert "did not return" in why[0]
    assert state_of(next_one)[0]
    assert next_one.call_under_way() is None
    assert next_one.abandon(call, "test") is None, "another call is no reason"


def test_a_machine_that_is_busy_with_other_things_is_no_slow_rule() -> None:
    rules = engine()
    assert fed(rules, going(4.0).records) == []
    assert not state_of(rules)[0]


def test_a_released_rule_starts_again_without_its_memory_and_says_so() -> None:
    rules, run = engine(), going(2.0)
    fed(rules, run.records)
    one = rules.run("made")
    assert one is not None
    data = RuleReleased(
        release_id="r1", run_id="made", incarnation=one.state.incarnation,
        rule="faulty", by="ana", at_ms=run.now_ms,
    )  # fmt: skip
    written = release_record(Topics(), data)
    offset = run.records[-1].offset + 1
    record = Record(
        written.partition, offset, run.now_ms, written.key, written.value, written.headers
    )
    assert record.partition == run.records[0].partition
    heard_ms = one.state.heard_ms

    rules.apply(replace(record, append_ms=run.now_ms + 5_000))

    assert state_of(rules) == (False, state_of(rules)[1])
    assert one.state.heard_ms == heard_ms, "it is no sign of life of the training"
    at = len(run.records)
    run.steps([4, 5], loss=1.0)
    moved = [replace(r, offset=r.offset + 1) for r in run.records[at:]]
    told = [one for r in moved for one in rules.apply(r)]
    assert state_of(rules)[1].state.steps == [4, 5]
    cold = [t.issue for t in told if t.issue.use == "cold_start"]
    assert ["released from quarantine by ana" in str(issue.model_dump()) for issue in cold] == [
        True
    ]
    # Read once more, as after a crash, it does nothing.
    rules.apply(replace(record, offset=offset + 9))
    assert state_of(rules)[1].state.steps == [4, 5]


def test_a_large_state_is_packed_and_comes_back() -> None:
    state = b'{"ranks":' + b"[1.25,3.5]," * 300_000
    packed = pack(state)
    assert len(packed) < len(state) / 50
    assert unpack(packed) == state
    assert pack(state[:1000]) == state[:1000]
    for damaged in (packed[:-5], packed[:10], packed[:9] + b"\x00" + packed[10:]):
        with pytest.raises(MalformedRecord):
            unpack(damaged)
    bomb = pack(bytes(MAX_UNPACKED + 1))
    with pytest.raises(MalformedRecord, match="too large"):
        unpack(bomb)
