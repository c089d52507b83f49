"""A run whose scalars alone are more than a worker can read: it is postponed, and loses nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import pytest

from support.rules.made_rules import counting_rule
from tocsin.bus.port import MAX_POLL_BYTES, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.second_reader import ReadAgain
from tocsin.runtime.service import Tick
from tocsin.schemas.records.collections import Tier
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.overload_decision import Decision, Fairness, FairnessPolicy, RunKey
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord
from tocsin.stream_rules.engine.rule_times import RuleTimes
from tocsin.stream_rules.engine.run import KEEP_MS, RUN_KEY
from tocsin.stream_rules.outcomes import Moment, Outcomes
from tocsin.stream_rules.overload_control import OverloadControl
from tocsin.stream_rules.rule import Params, Rule, scalar
from tocsin.stream_rules.rules.about_rules.telemetry_gap import TelemetryGap
from tocsin.stream_rules.rules.numerical.nonfinite import Nonfinite
from tocsin.stream_rules.rules.progress.telemetry_lost import TelemetryLost
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import START_MS, RunBuilder, only

TOPICS: Final = Topics()
NUMBER: Final = telemetry_partition("huge")
PLACE: Final = Partition(TOPICS.telemetry, NUMBER)
SPECS: Final = rule_specs()


def beside(number: int) -> str:
    """Another run on the same partition."""
    names = (f"small-{at}" for at in range(100_000))
    mine = (name for name in names if telemetry_partition(name) == NUMBER)
    return [next(mine) for _ in range(number + 1)][number]


def in_order(runs: Iterable[RunBuilder]) -> list[Record]:
    """The records of these as one partition has them."""
    records = sorted((r for run in runs for r in run.records), key=lambda r: r.append_ms)
    return [replace(r, partition=PLACE, offset=at) for at, r in enumerate(records)]


def faulty(run_id: str, dice: random.Random) -> RunBuilder:
    """A training that goes wrong in several ways, falls silent for a while, and goes on."""
    run = RunBuilder(run_id)
    run.now_ms = START_MS + dice.randrange(5_000)
    run.started()
    at = 0
    for part in range(6):
        loss = dice.choice([1.0, 1.0, math.nan, 50.0])
        run.steps(range(at, at + 15), loss=loss, gradient_norm=1.0, gradient_nonfinite=0)
        at += 15
        run.tensors(at, "gradients", ["a", "b"], nans={"a": dice.choice([0, 0, 2])})
        run.heartbeat(last_step=at)
        if part == 3 and dice.random() < 0.5:
            run.lose(records=3)
        run.wait(dice.choice([1, 30, 700]))
        if dice.random() < 0.2:
            # It starts again, perhaps with another incarnation while it is postponed.
            run.incarnation, run.boot = f"{run_id}-{part}", f"boot-{part}"
            run.started()
            at = 0
    if dice.random() < 0.5:
        run.ended()
    return run


def taken_in(
    apply: Callable[[Record], list[Reported]], record: Record, found: list[Reported]
) -> None:
    try:
        found += apply(record)
    except UnusableRecord as error:
        found += error.reported


class Worker:
    """An engine beside a log, as a worker is: it dies and comes back from its last checkpoint."""

    def __init__(self, records: Sequence[Record], dice: random.Random) -> None:
        self.records, self.dice = records, dice
        self.found: list[Reported] = []
        self.postponed = self.caught_up = self.died = 0
        self.engine = PartitionEngine(SPECS)
        self.next = self.committed = 0
        self.again: int | None = None
        self.saved: dict[tuple[str, str], Snapshot] = {}

    def run(self) -> None:
        while self.next < len(self.records) or self.engine.postponed():
            before = len(self.engine.postponed())
            turn = self.dice.random()
            if turn < 0.5 and self.next < len(self.records):
                taken_in(self.engine.apply, self.records[self.next], self.found)
                self.next += 1
            elif self.engine.postponed():
                self.read_again()
            if turn > 0.96:
                self.postpone()
            elif turn > 0.90:
                self.checkpoint(torn=turn > 0.93)
                if turn > 0.94 or turn < 0.91:
                    self.restart()
                    continue
            after = len(self.engine.postponed())
            self.caught_up += max(0, before - after)

    def read_again(self) -> None:
        """As the worker's reader: from the lowest place of those postponed."""
        places = [state.next_offset for state in self.engine.postponed().values()]
        self.again = min(places) if self.again is None else self.again
        if self.again < self.next:
            taken_in(self.engine.catch_up, self.records[self.again], self.found)
            self.again += 1
        if self.engine.rejoin({NUMBER}):
            self.again = None
            # A round of a worker ends with a checkpoint then, as the run is urgent.
            self.checkpoint(torn=False)

    def postpone(self) -> None:
        here = [
            run.state.run_id
            for number, _, run in self.engine.runs()
            if (number, run.state.run_id) not in self.engine.postponed()
        ]
        if here and self.engine.postpone(NUMBER, self.dice.choice(here), "a test"):
            self.postponed += 1
            self.again = None
            self.checkpoint(torn=False)

    def checkpoint(self, *, torn: bool) -> None:
        """`torn`: the snapshots are written, and the offset is not."""
        for _, state, run in self.engine.runs():
            if not run.dirty:
                continue
            for one in run.snapshots(
                next_offset=state.next_offset, clock_ms=state.clock_ms, software="", changed=True
            ):
                known = self.saved.get((one.run_id, one.rule))
                if known is None or one.next_offset >= known.next_offset:
                    self.saved[one.run_id, one.rule] = Snapshot.decode(one.encode())
            run.dirty, run.urgent = run.waits(state.next_offset), False
        if not torn:
            self.committed = self.next

    def restart(self) -> None:
        self.died += 1
        self.engine, self.next, self.again = PartitionEngine(SPECS), self.committed, None
        for run_id in sorted({run_id for run_id, _ in self.saved}):
            states = {rule: one for (name, rule), one in self.saved.items() if name == run_id}
            self.engine.adopt(NUMBER, run_id, states, next_offset=self.committed)
        if self.engine.rejoin({NUMBER}):
            self.checkpoint(torn=False)


def said(found: Iterable[Reported]) -> dict[str, list[str]]:
    """By run, the issues in their order, without repeats, and without those about postponement."""
    issues: dict[str, dict[str, None]] = {}
    for one in found:
        if one.issue.branch != "postponed":
            issues.setdefault(one.issue.run_id, {})[one.issue.model_dump_json()] = None
    return {run: list(rows) for run, rows in issues.items()}


@pytest.mark.parametrize("seed", [0, 1, 12, 73])
def test_issues_are_the_same_in_whatever_order_runs_are_read_and_workers_die(seed: int) -> None:
    dice = random.Random(seed)
    records = in_order(faulty(name, dice) for name in ("huge", beside(0), beside(1)))
    usual = PartitionEngine(SPECS)
    expected: list[Reported] = []
    for record in records:
        taken_in(usual.apply, record, expected)
    worker = Worker(records, dice)
    worker.run()
    assert worker.postponed > 2
    assert worker.caught_up > 2
    assert worker.died > 2
    assert said(expected)
    assert said(worker.found) == said(expected)
    for _, _, run in worker.engine.runs():
        same = usual.run(run.state.run_id)
        assert same is not None
        assert run.state.last_step == same.state.last_step
        assert run.state.missing == same.state.missing
        assert run.next_due_ms() == same.next_due_ms()


@pytest.mark.parametrize("lost_s", [0, 300])
@pytest.mark.parametrize("late", [False, True])
def test_a_bus_that_was_away_is_no_silence_of_a_postponed_run_either(
    lost_s: int, late: bool
) -> None:
    """`lost_s`: how long the run is silent before that, while others are not. `late`: it is read
    again only when all of the others was read."""
    runs = [RunBuilder(name) for name in (beside(0), "huge")]

    def beat(seconds: int, *, of: Sequence[RunBuilder] = runs) -> None:
        for _ in range(seconds // 10):
            for run in of:
                run.heartbeat()
            for run in runs:
                run.wait(10)

    for run in runs:
        run.started()
    beat(100)
    beat(lost_s, of=runs[:1])
    beat(100)
    before = sum(len(run.records) for run in runs)
    for run in runs:
        run.wait(600)
    beat(200)
    records = in_order(runs)
    usual, engine = PartitionEngine(only(TelemetryLost)), PartitionEngine(only(TelemetryLost))
    expected: list[Reported] = []
    found: list[Reported] = []
    for at, record in enumerate(records):
        expected += usual.apply(record, was_away=at == before)
        found += engine.apply(record, was_away=at == before)
        if not engine.postponements:
            if engine.run("huge") is not None:
                assert engine.postpone(NUMBER, "huge", "a test")
        elif not late:
            found += engine.catch_up(record)
    for record in records:
        found += engine.catch_up(record)
    assert bool(said(expected)) == bool(lost_s)
    assert said(found) == said(expected)


def test_a_postponed_run_that_is_level_with_others_has_timers_as_they_do() -> None:
    """It stays postponed while another partition lags, which may take long."""
    runs = [RunBuilder(name) for name in (beside(0), "huge")]
    for run in runs:
        run.started()
        run.heartbeat()
    records = in_order(runs)
    engine = PartitionEngine(only(TelemetryLost))
    for record in records:
        engine.apply(record)
    assert engine.postpone(NUMBER, "huge", "a test")
    runs[0].wait(10)
    runs[0].heartbeat()
    (behind,) = in_order(runs)[len(records) :]
    engine.apply(behind)

    later_ms = START_MS + 3_600_000
    found = engine.tick(NUMBER, later_ms, since_ms=START_MS)
    assert [each.issue.run_id for each in found] == [beside(0)], "of the other not all was read"
    assert (engine.next_due_ms() or 0) > later_ms
    engine.catch_up(behind)
    assert (engine.next_due_ms() or later_ms) < later_ms
    found = engine.tick(NUMBER, later_ms, since_ms=START_MS)
    assert [each.issue.run_id for each in found] == ["huge"]


def test_a_run_whose_first_checkpoint_was_torn_is_not_postponed_before_it_begins_anew() -> None:
    """It would be saved without rules, which whoever reads that took for new ones."""
    records = flood(seconds=1, until=1, nan_at=99)
    engine = PartitionEngine(SPECS)
    for record in records:
        engine.apply(record)
    run = engine.run("huge")
    assert run is not None
    *rules, own = run.snapshots(next_offset=len(records), clock_ms=START_MS, software="")
    assert own.rule == RUN_KEY
    engine = PartitionEngine(SPECS)
    engine.adopt(NUMBER, "huge", {one.rule: one for one in rules}, next_offset=0)
    assert not engine.postpone(NUMBER, "huge", "a test")
    for record in records:
        engine.apply(record)
    assert engine.postpone(NUMBER, "huge", "a test")


# -- the service


@dataclass(slots=True)
class _Seen:
    calls: int = 0


class CostlySteps(Rule[Params, _Seen]):
    """Takes a quarter of a second for each record of scalars of the huge run."""

    meta = counting_rule("costly_steps", scalar("*", mode=None))
    state_type = _Seen
    now_s = 0.0

    def on_steps(self, frame: object, at: Moment) -> Outcomes:
        CostlySteps.now_s += 0.25 if at.run.run_id == "huge" else 0.001
        self.state.calls += 1
        return ()


@pytest.fixture(autouse=True)
def fresh() -> None:
    CostlySteps.now_s = 0.0


def clock() -> float:
    return CostlySteps.now_s


def flood(*, seconds: int, until: int, nan_at: int) -> list[Record]:
    """A run that sends eight records of scalars a second, which take two, for a while, and one of a
    record a second. The loss of both is NaN from `nan_at` on."""
    huge, small = RunBuilder("huge"), RunBuilder(beside(0))
    huge.started()
    small.started()
    for second in range(seconds):
        loss = math.nan if second >= nan_at else 1.0
        small.now_ms = START_MS + 1_000 * second
        small.steps([second], loss=loss)
        for part in range(8 if second < until else 1):
            huge.now_ms = START_MS + 1_000 * second + 125 * part
            huge.steps([8 * second + part], loss=loss)
        if second % 10 == 9:
            huge.heartbeat()
    return in_order([huge, small])


Found = dict[tuple[str, str, str], tuple[float, IssueFiring]]


def worked(records: Sequence[Record], policy: FairnessPolicy) -> Found:
    """A worker that reads them as time goes by: when, seconds after the start, a branch of a rule
    first came into a state in a run, and what it was."""
    times = RuleTimes(clock, clock)
    specs = (*only(CostlySteps), *only(TelemetryGap), *only(Nonfinite))
    rules = RulesService(TOPICS, specs, times=times, fairness=Fairness(policy))
    found: Found = {}
    at = again = turn = 0
    while at < len(records) or not rules.settled():
        now_ms = START_MS + round(1_000 * CostlySteps.now_s)
        batch = [r for r in records[at : at + 20] if r.append_ms <= now_ms]
        at += len(batch)
        reading = rules.second_reading()
        if reading.turn != turn:
            turn, again = reading.turn, reading.places.get(PLACE, again)
        more: Sequence[Record] = ()
        if PLACE in reading.places and not reading.paused:
            more = [r for r in records[again : again + 20] if r.append_ms <= now_ms]
            again += len(more)
        if not batch and not more:
            CostlySteps.now_s += 0.1
        rules.read_again(ReadAgain(more, {}, turn))
        lag_ms = now_ms - batch[0].append_ms if batch else None
        assert rules.apply(batch, Tick(now_ms, frozenset({NUMBER}), lag_ms=lag_ms)) == []
        for out in rules.outputs():
            if out.partition.topic == TOPICS.issues and out.value is not None:
                event = decode(read_meta(out.headers), out.value)
                assert isinstance(event, Event)
                issue = event.data
                assert isinstance(issue, IssueFiring)
                what = issue.branch if issue.use == TelemetryGap.meta.name else issue.use
                key = issue.run_id, what or "", issue.state
                found.setdefault(key, (CostlySteps.now_s, issue))
        if rules.wants_checkpoint():
            rules.snapshots(force=False)
    return found


FLOOD: Final = {"seconds": 900, "until": 300, "nan_at": 260}


def test_the_issues_of_others_come_within_the_bound_and_the_run_loses_nothing() -> None:
    policy, records = FairnessPolicy(), flood(**FLOOD)
    found = worked(records, policy)
    small_s, _ = found[beside(0), "nonfinite", "firing"]
    # What may be left out of it is so in two windows, in vain: it has but scalars.
    assert small_s - 260 < (policy.lag_ms + 5 * policy.window_ms) / 1000

    postponed_s, issue = found["huge", "postponed", "firing"]
    assert postponed_s < 260
    assert issue.severity == "warning"
    assert "issues of this run come late, and nothing is lost" in issue.reason
    assert "this run used" in issue.evidence.explanation
    huge_s, nan = found["huge", "nonfinite", "firing"]
    assert huge_s > small_s + 100, "the run that is postponed pays for what it sends"
    assert nan.first_step == 8 * 260
    caught_up_s, _ = found["huge", "postponed", "resolved"]
    assert caught_up_s > huge_s
    assert CostlySteps.now_s < 1_000, "and it has caught up"


def test_without_that_they_wait_for_all_that_the_run_sends() -> None:
    found = worked(flood(**FLOOD), FairnessPolicy(lag_ms=10**9))
    small_s, _ = found[beside(0), "nonfinite", "firing"]
    assert small_s - 260 > 200


def control_of(engine: PartitionEngine, fairness: Fairness | None = None) -> OverloadControl:
    return OverloadControl(
        engine,
        fairness or Fairness(),
        telemetry=TOPICS.telemetry,
        wall_s=clock,
        metrics=Metrics(),
        nudge=lambda: None,
    )


def postponed_in(records: Sequence[Record]) -> tuple[PartitionEngine, OverloadControl]:
    """The huge run is postponed after its first record; all others of these were applied."""
    engine = PartitionEngine(only(CostlySteps))
    engine.apply(records[0])
    assert engine.postpone(NUMBER, "huge", "a test")
    for record in records[1:]:
        engine.apply(record)
    return engine, control_of(engine)


def test_it_takes_part_again_only_with_others_that_do_not_lag() -> None:
    """Else both would be as far behind as the others are, and they would wait for it again."""
    records = flood(seconds=20, until=20, nan_at=99)
    engine = PartitionEngine(only(CostlySteps))
    overload = control_of(engine)
    for record in records[:40]:
        engine.apply(record)
    assert engine.postpone(NUMBER, "huge", "a test")
    for record in records[40:50]:
        engine.apply(record)
    turn = overload.second_reading().turn
    # The reader is ahead of the others.
    overload.read_again(ReadAgain(records[40:60], {}, turn))
    late = Tick(START_MS, frozenset({NUMBER}), lag_ms=60_000)
    for _ in range(20):
        overload.catch_up(late, 0.0)
    assert engine.postponed()[NUMBER, "huge"].next_offset == 50

    for record in records[50:60]:
        engine.apply(record)
    overload.catch_up(replace(late, now_ms=START_MS + 1_000, lag_ms=None), 60.0)
    assert engine.postponed()[NUMBER, "huge"].next_offset == 60, "no record was lost"
    overload.catch_up(replace(late, now_ms=START_MS + 5_000, lag_ms=100), 0.0)
    assert not engine.postponed()
    run = engine.run("huge")
    assert run is not None
    assert run.state.missing == 0


def test_it_gets_little_time_while_others_lag_and_as_much_as_they_have_else() -> None:
    records = flood(seconds=20, until=20, nan_at=99)
    _, overload = postponed_in(records)
    overload.read_again(ReadAgain(records[1:], {}, overload.second_reading().turn))

    def spent_s(tick: Tick) -> float:
        began_s = clock()
        overload.catch_up(tick, 10.0)
        return clock() - began_s

    tick = Tick(START_MS, frozenset({NUMBER}), lag_ms=60_000)
    assert spent_s(tick) == pytest.approx(1.0, abs=0.25)
    assert spent_s(replace(tick, now_ms=START_MS + 5_000, lag_ms=0)) == pytest.approx(10, abs=0.25)


def test_what_was_read_of_a_partition_that_is_given_up_is_read_again() -> None:
    records = flood(seconds=5, until=5, nan_at=99)
    _, overload = postponed_in(records)
    before = overload.second_reading()
    overload.read_again(ReadAgain(records[1:], {}, before.turn))
    overload.catch_up(Tick(START_MS, frozenset()), 60.0)
    after = overload.second_reading()
    assert after.turn != before.turn
    assert after.places == before.places
    # What was under way is of the turn before.
    overload.read_again(ReadAgain(records[5:], {}, before.turn))
    overload.catch_up(Tick(START_MS, frozenset({NUMBER})), 60.0)
    assert overload.second_reading().places == before.places


class Postponing(Fairness):
    """Postpones the huge run at the end of each round, if it is there."""

    def round(self, now_ms: int, lag_ms: int | None) -> bool:
        return True

    def close(self, now_ms: int, *, runs: int, shed: Mapping[RunKey, Set[Tier]]) -> Decision:
        return Decision("postpone", "a test", (NUMBER, "huge"))


def test_passing_it_over_is_no_time_of_its_rules() -> None:
    """Else it could have the largest share, though it cannot give way once more, and nobody would
    in its place."""
    records = flood(seconds=5, until=5, nan_at=99)
    engine, fairness = PartitionEngine(only(CostlySteps)), Fairness()
    overload = control_of(engine, fairness)
    for record in records:
        engine.apply(record)
    assert engine.postpone(NUMBER, "huge", "a test")
    overload.spent((NUMBER, "huge"), 8.0)
    overload.spent((NUMBER, beside(0)), 1.0)
    overload.carry_out(Tick(START_MS, frozenset({NUMBER})))
    overload.carry_out(Tick(START_MS + fairness.policy.window_ms, frozenset({NUMBER})))
    assert fairness.largest_share == 1.0


@pytest.mark.parametrize("postponed", [False, True])
def test_no_run_of_a_partition_that_is_given_up_changes_its_place(postponed: bool) -> None:
    """It may be another worker's already, and what is written of it here would outlive that."""
    records = flood(seconds=20, until=20, nan_at=99)
    rules = RulesService(TOPICS, only(CostlySteps), fairness=Postponing())
    ours = frozenset({NUMBER}) if postponed else frozenset[int]()
    rules.apply(records, Tick(START_MS, ours, lag_ms=60_000))
    assert bool(rules.engine.postponed()) == postponed
    rules.snapshots(force=True)
    # It is parked, as it may come back; the others do not lag any more.
    rules.apply([], Tick(START_MS + 60_000, frozenset()))
    assert bool(rules.engine.postponed()) == postponed
    assert not rules.wants_checkpoint()
    assert not rules.snapshots(force=False)
    rules.apply([], Tick(START_MS + 61_000, frozenset({NUMBER})))
    assert rules.wants_checkpoint()


def saved(rules: RulesService) -> list[Record]:
    """Its states, as the bus has them."""
    written = [o for o in rules.snapshots(force=True) if o.partition.topic == TOPICS.state]
    return [Record(o.partition, at, 0, o.key, o.value, o.headers) for at, o in enumerate(written)]


@pytest.mark.parametrize("lag_ms", [0, 60_000])
def test_in_a_log_that_was_created_anew_it_begins_at_once(lag_ms: int) -> None:
    """As a run does that is not postponed: its place is that of the log that is gone."""
    before = RulesService(TOPICS, only(CostlySteps), fairness=Postponing())
    before.apply(flood(seconds=20, until=20, nan_at=99), Tick(START_MS, frozenset({NUMBER})))
    assert before.engine.postponed()
    after = RulesService(TOPICS, only(CostlySteps))
    after.restore(NUMBER, saved(before))
    after.restored(NUMBER, None)
    run = RunBuilder("huge")
    run.now_ms = START_MS + 3_600_000
    run.boot = "another"
    run.started()
    run.steps([1, 2, 3], loss=1.0)
    run.wait(1)
    run.steps([4], loss=1.0)
    after.apply(in_order([run]), Tick(run.now_ms, frozenset({NUMBER}), lag_ms=lag_ms))
    assert not after.engine.postponed()
    again = after.engine.run("huge")
    assert again is not None
    assert again.state.last_step == 4
    assert again.state.missing == 0


def test_its_state_is_kept_while_it_has_records_that_were_passed_over() -> None:
    """Though it was over for a day by the clock of those that it has read: it may have begun again
    among the others, and what it sends then would be without a run."""
    huge, small = RunBuilder("huge"), RunBuilder(beside(0))
    for builder in (huge, small):
        builder.started()
    huge.ended()
    for builder in (huge, small):
        builder.wait(KEEP_MS / 1000 + 60)
    small.heartbeat()
    huge.incarnation, huge.boot = "made-2", "boot-2"
    huge.wait(60)
    huge.started()
    huge.steps([0, 1], loss=1.0)
    records = in_order([huge, small])
    at = next(i for i, r in enumerate(records) if r.append_ms > START_MS + KEEP_MS)

    rules = RulesService(TOPICS, only(CostlySteps), fairness=Postponing())
    tick = Tick(records[-1].append_ms, frozenset({NUMBER}), lag_ms=60_000)
    rules.apply(records[:1], tick)
    assert rules.engine.postponed()
    rules.apply(records[1:], tick)
    turn = rules.second_reading().turn
    for some in (records[1 : at + 1], records[at + 1 :]):
        rules.read_again(ReadAgain(some, {}, turn))
        for _ in some:
            rules.apply([], tick)
        rules.snapshots(force=False)
    run = rules.engine.run("huge")
    assert run is not None
    assert run.state.incarnation == "made-2"
    assert run.state.last_step == 1


def test_nobody_gives_way_to_others_that_wait_for_the_bus() -> None:
    """A postponed run is read while they have nothing to do: that keeps the worker busy, but is not
    why they lag."""
    huge, *others = runs = [RunBuilder(name) for name in ("huge", beside(0), beside(1))]
    for run in runs:
        run.started()
    for step in range(200):
        huge.steps([step], loss=1.0)
    records = in_order(runs)
    engine, overload = postponed_in(records)
    overload.read_again(ReadAgain(records[1:], {}, overload.second_reading().turn))
    for second in range(30):
        overload.spent((NUMBER, others[0].run_id), 0.01)
        tick = Tick(START_MS + 1_000 * second, frozenset({NUMBER}), lag_ms=60_000)
        overload.catch_up(tick, 0.01)
        for _ in range(3):
            # Nothing came of the others.
            overload.catch_up(replace(tick, lag_ms=None), 0.0)
        overload.carry_out(tick)
    assert clock() > 20, "it was busy"
    assert not any(run.state.shedding.tiers for _, _, run in engine.runs())


@pytest.mark.parametrize(("number", "size", "paused"), [(3, 10, False), (500, 1, True)])
def test_what_was_read_again_and_waits_has_a_bound(number: int, size: int, paused: bool) -> None:
    engine = PartitionEngine(only(CostlySteps))
    overload = control_of(engine)
    (record, *_) = flood(seconds=1, until=1, nan_at=99)
    engine.apply(record)
    assert engine.postpone(NUMBER, "huge", "a test")
    read = [replace(record, offset=at, value=bytes(size)) for at in range(1, number + 1)]
    turn = overload.second_reading().turn
    overload.read_again(ReadAgain(read, {}, turn))
    assert overload.second_reading().paused == paused
    big = replace(record, offset=number + 1, value=bytes(MAX_POLL_BYTES))
    overload.read_again(ReadAgain([big], {}, turn))
    assert overload.second_reading().paused


def test_with_its_last_runs_go_what_was_measured_of_them() -> None:
    metrics, policy = PrometheusMetrics(), FairnessPolicy()
    times = RuleTimes(clock, clock)
    rules = RulesService(TOPICS, only(CostlySteps), times=times, metrics=metrics)
    tick = Tick(START_MS, frozenset({NUMBER}), lag_ms=60_000)
    rules.apply(flood(seconds=20, until=20, nan_at=99), tick)
    (number, _, run), *_ = rules.engine.runs()
    assert rules.engine.postpone(number, run.state.run_id, "a test")
    rules.apply([], replace(tick, now_ms=START_MS + policy.window_ms))
    gauges = (names.LARGEST_SHARE, names.POSTPONED_RUNS)
    assert all(metrics.value(name) for name in gauges)
    rules.release({NUMBER})
    assert not any(metrics.value(name) for name in (*gauges, names.POSTPONED_SECONDS))
