"""A state of another version of a rule: it migrates, or the rule starts cold and says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pytest

from support.rules.made_rules import loss_rule
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.engine.run import RUN_KEY, RUN_STATE_VERSION, RunEngine
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.rule import AnyRule, Params, Rule
from tocsin.stream_rules.testing import RunBuilder


class CountsParams(Params):
    pass


@dataclass(slots=True)
class OldState:
    seen: int = 0


@dataclass(slots=True)
class NewState:
    steps: int = 0


META = loss_rule("counts", CountsParams, history_steps=5)


class Counts(Rule[CountsParams, OldState]):
    meta = META
    state_type = OldState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        self.state.seen += len(frame.steps)
        return ()


class NextCounts(Rule[CountsParams, NewState]):
    meta = replace(META, version=2)
    state_type = NewState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        self.state.steps += len(frame.steps)
        return ()


class MigratingCounts(NextCounts):
    def migrate(self, payload: bytes, version: int) -> None:
        if version != 1:
            raise MalformedRecord(f"version {version} is not known")
        self.state = NewState(steps=json.loads(payload)["seen"])


CountsRule = type[Counts] | type[NextCounts]


def engine(rule: CountsRule) -> PartitionEngine:
    return PartitionEngine(
        [*rule_specs(), RuleSpec(name="counts", rule=rule, params=CountsParams())]
    )


def saved_by(rule: CountsRule) -> tuple[RunBuilder, dict[str, Snapshot]]:
    """A run of four steps, and its states as a worker with that rule saves them."""
    run = RunBuilder()
    run.started()
    run.steps(range(4), loss=1.0)
    worker = engine(rule)
    for record in run.records:
        worker.apply(record)
    known = worker.run("made")
    assert known is not None
    offset = len(run.records)
    saved = known.snapshots(next_offset=offset, clock_ms=run.now_ms, software="1")
    return run, {one.rule: Snapshot.decode(one.encode()) for one in saved}


def taken_over(
    rule: CountsRule, run: RunBuilder, states: Mapping[str, Snapshot]
) -> tuple[RunEngine, list[str]]:
    """The run, two steps later, of a worker with that rule, and what it says of a cold start."""
    worker, offset = engine(rule), len(run.records)
    worker.adopt(run.records[0].partition.number, "made", states, next_offset=offset)
    run.steps([4, 5], loss=1.0)
    told = [one.issue for record in run.records[offset:] for one in worker.apply(record)]
    after = worker.run("made")
    assert after is not None
    return after, [str(issue.model_dump()) for issue in told if issue.use == "cold_start"]


def counting(run: RunEngine) -> AnyRule:
    """The rule that counts steps."""
    (instance,) = [one for one in run.instances if one.spec.name == "counts"]
    return instance.rule


@pytest.mark.parametrize("migrates", [True, False])
def test_a_state_of_the_version_before(migrates: bool) -> None:
    run, states = saved_by(Counts)
    after, cold = taken_over(MigratingCounts if migrates else NextCounts, run, states)
    rule = counting(after)
    assert isinstance(rule, NextCounts)
    assert rule.state.steps == (6 if migrates else 2)
    if migrates:
        assert cold == []
    else:
        assert "version 2 cannot read that of version 1" in cold[0]
    again = after.snapshots(next_offset=9, clock_ms=run.now_ms, software="2", changed=True)
    assert {one.rule: one.rule_version for one in again}["counts"] == 2


def test_a_state_of_the_next_version_in_a_worker_that_was_rolled_back() -> None:
    after, cold = taken_over(Counts, *saved_by(NextCounts))
    rule = counting(after)
    assert isinstance(rule, Counts)
    assert rule.state.seen == 2
    assert "version 1 cannot read that of version 2" in cold[0]


def test_what_the_next_version_of_the_engine_has_saved_of_a_run_starts_it_cold() -> None:
    run, states = saved_by(Counts)
    states[RUN_KEY] = replace(states[RUN_KEY], rule_version=RUN_STATE_VERSION + 1)
    after, cold = taken_over(Counts, run, states)
    rule = counting(after)
    assert isinstance(rule, Counts)
    assert rule.state.seen == 2, "its state belongs to what cannot be read"
    assert len(cold) == 1
    assert after.state.last_step == 5, "it goes on"


def test_a_workers_states_grow_with_tensors_and_with_ranks_and_not_with_their_product() -> None:
    def size(ranks: int, tensors: int) -> int:
        run = RunBuilder(world_size=ranks)
        names = [f"layer.{number}.weight" for number in range(tensors)]
        for rank in range(ranks):
            run.started(rank=rank)
        for step in (0, 10, 20):
            for rank in range(ranks):
                run.steps([step], loss=1.0, gradient_norm=1.0, gradient_nonfinite=0, rank=rank)
                for collection in ("gradients", "weights", "updates"):
                    run.tensors(step, collection, names, columns={"l2": 1.0}, rank=rank)
        engine = PartitionEngine(rule_specs())
        for record in run.records:
            engine.apply(record)
        state = engine.run("made")
        assert state is not None
        saved = state.snapshots(next_offset=1, clock_ms=run.now_ms, software="")
        return sum(len(one.payload) for one in saved)

    small = size(2, 20)
    by_ranks, by_tensors = size(20, 20) - small, size(2, 200) - small
    assert size(20, 200) - small < 1.1 * (by_ranks + by_tensors)
