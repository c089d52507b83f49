"""A huge run beside a small one on a worker that cannot keep up: what is left out, what is not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.records.on_bus import data_of, send, work
from support.rules.made_rules import counting_rule
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Record
from tocsin.runtime.service import Tick
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.collections import Tier, tier_of
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.engine.overload_decision import Decision, Fairness, FairnessPolicy, RunKey
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.rule_times import RuleTimes
from tocsin.stream_rules.outcomes import Moment, Outcomes
from tocsin.stream_rules.reading.shedding import MAX_SPANS, Shedding
from tocsin.stream_rules.rule import Params, Rule, scalar, tensors
from tocsin.stream_rules.rules.about_rules.telemetry_gap import TelemetryGap
from tocsin.stream_rules.rules.numerical.nonfinite import Nonfinite
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import START_MS, RunBuilder, only

TOPICS = Topics()
NAMES = ["a", "b"]
NEVER = FairnessPolicy(lag_ms=10**9)


@dataclass(slots=True)
class _Seen:
    calls: int = 0


class Costly(Rule[Params, _Seen]):
    """Takes a quarter of a second for each summary, on a clock of its own."""

    meta = counting_rule("costly", tensors("*", mode=None), scalar("*", mode=None))
    state_type = _Seen
    now_s = 0.0
    seen: ClassVar[list[tuple[str, int]]] = []

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        Costly.now_s += 0.25
        Costly.seen.append((frame.collection, frame.step))
        self.state.calls += 1
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        Costly.seen += [("scalars", int(step)) for step in frame.steps]
        return ()


@pytest.fixture(autouse=True)
def fresh() -> None:
    Costly.now_s = 0.0
    Costly.seen = []


SPECS = (*only(Costly), *only(TelemetryGap), *only(Nonfinite))


def beside(run_id: str) -> str:
    """A run on the same partition."""
    names = (f"small-{number}" for number in range(10_000))
    return next(n for n in names if telemetry_partition(n) == telemetry_partition(run_id))


def flood(*, seconds: int, nan_at: int) -> list[Record]:
    """A run that sends eight summaries a second, which take two, and one of a step a second whose
    loss is NaN from `nan_at` on."""
    huge, small = RunBuilder("huge"), RunBuilder(beside("huge"))
    huge.started()
    small.started()
    for second in range(seconds):
        small.now_ms = START_MS + 1_000 * second
        small.steps([second], loss=math.nan if second >= nan_at else 1.0)
        for eighth in range(8):
            huge.now_ms = START_MS + 1_000 * second + 125 * eighth
            collection = ("activations", "logits", "gradients", "weights")[eighth % 4]
            huge.tensors(second, collection, NAMES)
        huge.steps([second], loss=1.0)
        if second % 10 == 9:
            huge.heartbeat()
    records = sorted([*huge.records, *small.records], key=lambda record: record.append_ms)
    return [
        Record(r.partition, at, r.append_ms, r.key, r.value, r.headers)
        for at, r in enumerate(records)
    ]


def clock() -> float:
    return Costly.now_s


Found = dict[str, tuple[float, IssueFiring]]


def worked(records: Sequence[Record], policy: FairnessPolicy) -> Found:
    """A worker that reads them as time goes by: when, seconds after the start, each rule first
    fired, and what."""
    times = RuleTimes(clock, clock)
    rules = RulesService(TOPICS, SPECS, times=times, fairness=Fairness(policy))
    number, at = records[0].partition.number, 0
    found: Found = {}
    while at < len(records):
        now_ms = START_MS + round(1_000 * Costly.now_s)
        batch = [r for r in records[at : at + 20] if r.append_ms <= now_ms]
        if not batch:
            Costly.now_s += 0.1
            continue
        at += len(batch)
        tick = Tick(now_ms, frozenset({number}), lag_ms=now_ms - batch[0].append_ms)
        assert rules.apply(batch, tick) == []
        for out in rules.outputs():
            if out.partition.topic == TOPICS.issues and out.value is not None:
                told = decode(read_meta(out.headers), out.value)
                assert isinstance(told, Event)
                assert isinstance(told.data, IssueFiring)
                found.setdefault(told.data.use, (Costly.now_s, told.data))
        if rules.wants_checkpoint():
            rules.snapshots(force=False)
    return found


def test_the_issues_of_other_runs_come_within_the_bound_while_a_huge_run_floods() -> None:
    records = flood(seconds=300, nan_at=260)
    found = worked(records, FairnessPolicy())
    told_s, _ = found["nonfinite"]
    policy = FairnessPolicy()
    assert told_s - 260 < (policy.lag_ms + 2 * policy.window_ms) / 1000

    told_s, gap = found["telemetry_gap"]
    assert gap.run_id == "huge"
    assert gap.branch == "shed"
    assert "summaries of tensors were not judged from step " in gap.reason
    assert "this run used" in gap.evidence.explanation
    scalars = [step for kind, step in Costly.seen if kind == "scalars"]
    assert sorted(scalars) == sorted([*range(300), *range(300)]), "scalars are never left out"


def test_without_that_they_wait_for_all_that_the_huge_run_sends() -> None:
    told_s, _ = worked(flood(seconds=300, nan_at=260), NEVER)["nonfinite"]
    assert told_s - 260 > 200


def test_whole_steps_are_left_out_and_tier_2_first() -> None:
    worked(flood(seconds=200, nan_at=190), FairnessPolicy())
    judged: dict[int, set[str]] = {step: set() for step in range(200)}
    for collection, step in Costly.seen:
        if collection != "scalars":
            judged[step].add(collection)
    first = {"gradients", "weights"}
    everything = first | {"activations", "logits"}
    steps = list(judged.values())
    assert all(one in (everything, first, set()) for one in steps)
    assert steps[0] == everything
    assert steps.index(first) < steps.index(set()), "tier 1 only after tier 2"
    each = [step for kind, step in Costly.seen if kind == "gradients" and judged[step] == first]
    assert len(each) == 2 * len(set(each)), "all that a step has, or nothing"


# -- one frame


def frame(collection: str, step: int, *, nans: int = 0, infs: int = 0) -> TensorFrame:
    run = RunBuilder()
    run.tensors(step, collection, NAMES, nans={"a": nans}, infs={"b": infs})
    (record,) = run.records
    assert record.value is not None
    return TensorFrame.decode(record.value)


@given(
    st.sampled_from(["activations", "mine", "gradients", "weights", "labels", "no_gradient"]),
    st.integers(0, 60),
    st.integers(0, 1),
    st.integers(0, 1),
    st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(0, 9), st.booleans()), max_size=6),
)
def test_only_finite_summaries_of_the_steps_and_tiers_that_were_decided_are_left_out(
    collection: str, step: int, nans: int, infs: int, changes: list[tuple[Tier, int, bool]]
) -> None:
    shedding, out = Shedding(), set[tuple[Tier, int]]()
    for tier, steps, begins in changes:
        shedding.note_step(shedding.top_step + steps)
        top = shedding.top_step
        out = {one for one in out if one[0] != tier or one[1] <= top}
        if begins and tier not in shedding.tiers:
            shedding.start(tier, "")
        elif not begins:
            shedding.end(tier)
        if begins:
            out |= {(tier, later) for later in range(top + 1, 200)}
    expected = (tier_of(collection), step) in out and not nans and not infs
    assert shedding.leaves_out(frame(collection, step, nans=nans, infs=infs)) == expected


def test_a_span_that_goes_on_is_not_forgotten_for_later_ones() -> None:
    shedding = Shedding()
    shedding.start(2, "much of it")
    for step in range(2 * MAX_SPANS):
        shedding.note_step(step)
        shedding.start(1, "more")
        shedding.end(1)
    assert len(shedding.spans) == MAX_SPANS
    assert shedding.tiers == {2}
    assert [span.until_step for span in shedding.spans[-2:]] == [step, step + 1]
    shedding.end(2)
    assert not shedding.tiers


# -- the engine


def healthy(steps: int = 120) -> RunBuilder:
    """Two ranks of a training that is well, with what a capture sends of it."""
    dice = np.random.default_rng(7)
    run = RunBuilder(world_size=2)
    for rank in (0, 1):
        run.started(rank=rank)
    for step in range(steps):
        for rank in (0, 1):
            run.steps(
                [step],
                rank=rank,
                loss=2.0 * 0.995**step + 0.01 * dice.random(),
                gradient_norm=1.0 + 0.1 * dice.random(),
                gradient_nonfinite=0,
                step_time_s=0.1,
                columns={"lr.0": 1e-3},
            )
            if step % 10 == 0:
                for collection in ("gradients", "weights", "updates", "activations", "logits"):
                    more = {"update_l2": 0.01 + 0.001 * dice.random()}
                    run.tensors(
                        step,
                        collection,
                        NAMES,
                        rank=rank,
                        columns={
                            "l2": 1.0 + 0.1 * dice.random(),
                            **(more if collection == "updates" else {}),
                        },
                    )
                run.heartbeat(rank=rank, last_step=step)
    for rank in (0, 1):
        run.ended(rank=rank)
    return run


def told(
    records: Iterable[Record],
    specs: Sequence[RuleSpec],
    changes: dict[int, tuple[Tier, bool]],
    *,
    restart_every: int | None = None,
) -> list[str]:
    """The issues but those of `telemetry_gap`, where after so many records a tier is left out
    (True) or judged again."""
    engine, found = PartitionEngine(specs), []
    for at, record in enumerate(records, 1):
        found += [one.issue for one in engine.apply(record)]
        run = engine.run("made")
        assert run is not None
        if at in changes:
            tier, out = changes[at]
            if out:
                run.shed(tier, "a test")
            else:
                run.evaluate_again(tier)
        if restart_every is not None and (at % restart_every == 0 or at in changes):
            saved = run.snapshots(next_offset=at, clock_ms=record.append_ms, software="")
            engine = PartitionEngine(specs)
            read = {one.rule: Snapshot.decode(one.encode()) for one in saved}
            engine.adopt(record.partition.number, "made", read, next_offset=at)
    return [one.model_dump_json() for one in found if one.rule != "telemetry_gap"]


def test_a_healthy_run_of_which_much_is_left_out_has_no_issue_for_it() -> None:
    run, specs, dice = healthy(), rule_specs(), random.Random(3)
    usual = told(run.records, specs, {})
    for _ in range(2):
        cuts = sorted(dice.sample(range(1, len(run.records)), 4))
        changes: dict[int, tuple[Tier, bool]] = dict(
            zip(cuts, [(2, True), (1, True), (1, False), (2, False)], strict=True)
        )
        assert told(run.records, specs, changes) == usual
    always: dict[int, tuple[Tier, bool]] = {1: (2, True), 2: (1, True)}
    assert told(run.records, specs, always) == usual, "nor one without any input"


def test_a_nan_is_found_in_the_summary_of_a_step_that_is_left_out() -> None:
    run = healthy(60)
    run.records.pop()
    run.records.pop()
    run.tensors(60, "gradients", NAMES, nans={"b": 3})
    run.steps([60, 61], rank=0, loss=math.nan, gradient_nonfinite=1, gradient_norm=math.nan)
    run.steps([60, 61], rank=1, loss=math.nan, gradient_nonfinite=1, gradient_norm=math.nan)
    usual = told(run.records, only(Nonfinite), {})
    assert '"b"' in usual[0]
    assert told(run.records, only(Nonfinite), {2: (1, True), 3: (2, True)}) == usual


def test_what_is_left_out_is_so_again_after_a_restart() -> None:
    run = healthy(40)
    run.steps(range(40, 60), loss=50.0, gradient_norm=1.0, gradient_nonfinite=0)
    changes: dict[int, tuple[Tier, bool]] = {30: (2, True), 50: (1, True), 90: (1, False)}
    specs = (*only(Costly), *rule_specs())
    without = told(run.records, specs, changes)
    seen, Costly.seen = Costly.seen, []
    assert told(run.records, specs, changes, restart_every=7) == without
    assert Costly.seen == seen


class Hurried(Fairness):
    """Leaves tier 2 of a run out after its first round."""

    def round(self, now_ms: int, lag_ms: int | None) -> bool:
        return True

    def close(self, now_ms: int, *, runs: int, shed: Mapping[RunKey, Set[Tier]]) -> Decision:
        todo = [run for run, tiers in shed.items() if not tiers]
        return Decision("shed", "a test", todo[0], 2) if todo else Decision("keep", "")


async def test_a_decision_is_on_the_bus_before_anything_is_left_out_for_it(tmp_path: Path) -> None:
    """Else a worker that dies in between would judge what was left out, or the other way round."""
    run = healthy(40)
    service = RulesService(TOPICS, rule_specs(), fairness=Hurried())
    passed: list[tuple[str, int, int]] = []

    def note(point: str) -> None:
        for _, _, one in service.engine.runs():
            shedding = one.state.shedding
            passed.append((point, len(shedding.spans), shedding.records))

    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        await send(bus, run.records)
        settings = WorkerSettings(checkpoint_s=600, poll_records=20)
        worker = Worker(bus, service, topics=TOPICS, group="g", settings=settings, crash=note)
        assert await work(worker)
        found = await data_of(bus, TOPICS.issues, issue_partition("made"))
    decided = next(at for at, (_, spans, _) in enumerate(passed) if spans)
    left_out = next(at for at, (_, _, records) in enumerate(passed) if records)
    assert "committed" in [point for point, _, _ in passed[decided:left_out]]
    gaps = [one for one in found if isinstance(one, IssueFiring) and one.branch == "shed"]
    span = service.engine.runs()[0][2].state.shedding.spans[0]
    assert f"summaries of tensors were not judged from step {span.from_step} to " in gaps[0].reason
    assert gaps[0].evidence.explanation == "a test"
