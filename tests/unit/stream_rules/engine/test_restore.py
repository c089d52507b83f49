"""State that carries its offset: a restart anywhere, torn checkpoints too, changes no issue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tocsin.bus.port import Record
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.runs import Group, RunStarted
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.reading.state_codec import StateArray, dump_state, load_state
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.testing import RunBuilder

NAN = math.nan
ROWS = ("head", "b.1", "b.0")


def specs() -> tuple[RuleSpec, ...]:
    """All rules, quick enough to show all their states on a short run."""
    quick: dict[str, dict[str, object]] = {
        "loss_not_decreasing": {"num_steps": 12, "patience": 2},
        "loss_diverged": {"for_steps": 8, "quick_steps": 4},
        "exploding_gradient": {"warmup_steps": 5},
        "stalled_training": {"threshold": "20s"},
        "rule_has_no_input": {"grace": 10},
    }
    return tuple(_spec(rule, quick.get(rule.meta.name, {})) for rule in built_in())


def _spec(rule: type[AnyRule], params: dict[str, object]) -> RuleSpec:
    made = rule.meta.params.model_validate(params)
    return RuleSpec(name=rule.meta.name, rule=rule, params=made, listed=True)


@cache
def history() -> tuple[Record, ...]:
    """Two ranks and a launcher; each rule speaks; a second incarnation after the first."""
    run = RunBuilder(world_size=2)
    run.started(role="launcher")
    for boot in ("boot", "again"):
        run.boot, run.incarnation = boot, f"made-{boot}"
        for rank in (0, 1):
            run.started(rank=rank)
        chance = np.random.default_rng(3)
        for step in range(40):
            loss = 1.0 + 0.01 * float(chance.standard_normal())
            norm = 1.0
            if 20 <= step < 26:
                loss, norm = 900.0, 500.0
            for rank in (0, 1):
                run.steps(
                    [step],
                    rank=rank,
                    loss=loss,
                    gradient_norm=norm,
                    gradient_nonfinite=0,
                    step_time_s=0.1,
                )
            if step % 10 == 0:
                run.checkpoint(step)
                run.tensors(step, "weights", ROWS)
        for _ in range(4):
            run.wait(10)
            for rank in (0, 1):
                run.heartbeat(rank=rank, last_step=39)
        run.wait(200)
        for rank in (1, 0):
            loss = NAN if rank == 1 else 1.0
            run.steps([40], rank=rank, loss=loss, gradient_norm=NAN, gradient_nonfinite=2)
            run.tensors(40, "gradients", ROWS, rank=rank, nans={"b.1": 1, "b.0": 1})
        run.tensors(40, "local_gradients", ["b.1"], rank=1, nans={"b.1": 1})
        run.steps(range(41, 70), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
        for rank in (0, 1):
            run.ended(rank=rank, outcome="stopped")
    return tuple(run.records)


@cache
def expected() -> tuple[str, ...]:
    return tuple(unmarked(replay(history(), specs())))


def unmarked(told: Iterable[Reported]) -> Iterator[str]:
    """Without causes: what a torn checkpoint has lost of these, a repeat need not say again."""
    for one in told:
        if one.because is None:
            evidence = one.issue.evidence.model_copy(update={"cause": ""})
            remedy = one.issue.remedy.rpartition(" this issue follows from it. ")[2]
            update = {"consequence_of": None, "evidence": evidence, "remedy": remedy}
            yield one.issue.model_copy(update=update).model_dump_json()


@dataclass
class Worker:
    """What is on the bus of a worker that may die at any point of a checkpoint."""

    saved: dict[str, Snapshot] = field(default_factory=dict)
    committed: int = 0
    issues: list[str] = field(default_factory=list)

    def run(self, until: int, *, written: int | None) -> None:
        """Restore, work up to a record with a checkpoint on the way, and make another one, of which
        only `written` snapshots get out."""
        engine = PartitionEngine(specs())
        if self.saved:
            number = history()[0].partition.number
            engine.adopt(number, "made", self.saved, next_offset=self.committed)
        half = (self.committed + until) // 2
        for record in history()[self.committed : half]:
            self.issues += unmarked(engine.apply(record))
        if half > self.committed:
            self.save(engine, half, written=None)
        for record in history()[half:until]:
            self.issues += unmarked(engine.apply(record))
        self.save(engine, until, written=written)

    def save(self, engine: PartitionEngine, until: int, *, written: int | None) -> None:
        state = engine.run("made")
        if state is None:
            return
        clock_ms = max(record.append_ms for record in history()[:until])
        snapshots = state.snapshots(next_offset=until, clock_ms=clock_ms, software="", changed=True)
        for snapshot in snapshots[:written]:
            decoded = Snapshot.decode(snapshot.encode())
            known = self.saved.get(decoded.rule)
            if known is None or known.next_offset <= decoded.next_offset:
                self.saved[decoded.rule] = decoded
        if written is None:
            self.committed = until


def test_the_history_shows_every_rule() -> None:
    rules = {line.split('"rule":"')[1].split('"')[0] for line in expected()}
    assert rules >= {
        "nonfinite",
        "exploding_gradient",
        "loss_diverged",
        "loss_not_decreasing",
        "stalled_training",
        "telemetry_lost",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "at_the_end"), [(53, 11), pytest.param(1, 1, marks=pytest.mark.torture)]
)
def test_a_restart_after_any_record_changes_nothing(every: int, at_the_end: int) -> None:
    records, bad = history(), []
    last = range(len(records) - 80, len(records), at_the_end)
    for at in (*range(1, len(records), every), *last):
        worker = Worker()
        worker.run(at, written=None)
        worker.run(len(records), written=None)
        if tuple(worker.issues) != expected():
            bad.append(at)
    assert bad == []


NODE_AND_TENSORS = (
    "disk_full",
    "host_memory_increase",
    "low_gpu_utilization",
    "loss_spike",
    "learning_rate_anomaly",
    "unchanged_tensor",
    "weight_update_ratio",
    "vanishing_gradient",
    "dead_relu",
)


def on_node_and_tensors() -> tuple[RuleSpec, ...]:
    quick: dict[str, dict[str, object]] = {
        "loss_spike": {"window": 10, "for_steps": 3, "recover_steps": 6},
        "low_gpu_utilization": {"window": 20, "patience": 20},
        "unchanged_tensor": {"tensors": ["tensors/*"]},
        "weight_update_ratio": {"warmup_steps": 0},
    }
    found = map(built_in().get, NODE_AND_TENSORS)
    return tuple(_spec(rule, quick.get(rule.meta.name, {})) for rule in found)


@cache
def node_and_tensors() -> tuple[Record, ...]:
    """Each of those rules speaks, and most of them are heard again when it is over."""
    run = RunBuilder()
    groups = tuple(Group(index=i, parameters=i + 1) for i in range(2))
    run.event(RunStarted(run_id=run.run_id, incarnation="made-1", job_id="job", groups=groups))
    for i in range(40):
        jumped, over = 10 <= i < 20, i > 30
        lr = {"lr.0": 5.0 if jumped else NAN if i == 25 else 1e-3, "lr.1": 0.0 if i > 20 else 0.1}
        run.steps(range(10 * i, 10 * i + 10), loss=9.0 if jumped else 1.0 + i % 2, columns=lr)
        run.tensors(10 * i, "gradients", ROWS, columns={"l1": 1.0 if over else 1e-9})
        sizes = [1.0 + i * over, 1.0, 1.0 + i]
        run.tensors(10 * i, "weights", ROWS, columns={"l2": sizes})
        run.tensors(10 * i, "updates", ROWS, columns={"update_l2": [1e-3 * over, 1e-12, 1e-3]})
        run.tensors(10 * i, "activations", ROWS, columns={"dead": NAN if i % 7 == 6 else 0.9})
        for name in ("kept", "moved"):
            run.tensors(10 * i, "tensors", (name,), columns={"l2": i * (name == "moved") + 1.0})
        node = {
            "disk.free_bytes": max(1e9, 60e9 - 2e9 * i) if i < 36 else 60e9,
            "disk.total_bytes": 500e9,
            "memory.process_tree_bytes": min(8e9 + 0.2e9 * i, 14e9),
            "memory.limit_bytes": 16e9,
            "gpu.0.utilization_percent": 30.0 if i < 25 else 99.0,
        }
        run.system({name: [value] * 10 for name, value in node.items()}, every_s=5.0)
    run.wait(1500)
    run.system({name: [value] for name, value in node.items()})
    run.ended()
    return tuple(run.records)


def test_a_restart_changes_nothing_for_rules_on_nodes_and_tensors() -> None:
    records, specs = node_and_tensors(), on_node_and_tensors()
    told = [one.issue.model_dump_json() for one in replay(records, specs)]
    rules = {line.split('"rule":"')[1].split('"')[0] for line in told}
    assert rules == set(NODE_AND_TENSORS)
    number = records[0].partition.number
    engine = PartitionEngine(specs)
    again: list[str] = []
    for at, record in enumerate(records, 1):
        again += [one.issue.model_dump_json() for one in engine.apply(record)]
        state = engine.run("made")
        if at % 5 or state is None:
            continue
        saved = state.snapshots(next_offset=at, clock_ms=record.append_ms, software="")
        engine = PartitionEngine(specs)
        engine.adopt(
            number,
            "made",
            {one.rule: Snapshot.decode(one.encode()) for one in saved},
            next_offset=at,
        )
    assert again == told


def points() -> st.SearchStrategy[list[tuple[int, int | None]]]:
    at = st.integers(1, len(history()))
    return st.lists(st.tuples(at, st.none() | st.integers(0, 8)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(points())
@example([(1, 1), (1, 0)])
@example([(138, 1), (138, None)])
def test_crashes_in_the_middle_of_checkpoints_repeat_and_never_invent(
    crashes: Sequence[tuple[int, int | None]],
) -> None:
    worker = Worker()
    for at, written in sorted(crashes, key=lambda crash: crash[0]):
        worker.run(at, written=written)
    worker.run(len(history()), written=None)
    assert set(worker.issues) == set(expected())
    # What is left once repeats are dropped is in the same order.
    assert tuple(dict.fromkeys(worker.issues)) == expected()


# -- the codec


@dataclass
class Inner:
    values: list[float] = field(default_factory=list)


@dataclass
class Outer:
    by_rank: dict[int, Inner] = field(default_factory=dict)
    pair: tuple[int, float] | None = None
    array: StateArray = field(default_factory=lambda: np.zeros((0, 3), np.float32))


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.floats())),
    st.lists(st.floats(width=32), max_size=5),
)
def test_a_state_comes_back_bit_for_bit(values: dict[int, list[float]], row: list[float]) -> None:
    array = np.asarray([row, row], np.float32)
    state = Outer({rank: Inner(list(row)) for rank, row in values.items()}, (1, NAN), array)
    back = load_state(Outer, dump_state(state))
    assert dump_state(back) == dump_state(state)
    assert back.array.dtype == np.float32
    assert back.array.tobytes() == array.tobytes()


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"by_rank": 3}', b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_state_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedRecord):
        load_state(Outer, payload)


def test_a_snapshot_that_cannot_be_read_starts_the_rule_cold() -> None:
    worker = Worker()
    worker.run(50, written=None)
    broken = worker.saved["nonfinite"]
    for payload in (b"", b"\xff" * 40, broken.payload[:-3]):
        worker.saved["nonfinite"] = Snapshot(
            run_id="made",
            incarnation=broken.incarnation,
            rule="nonfinite",
            rule_version=1,
            next_offset=50,
            payload=payload,
        )
        again = Worker(dict(worker.saved), worker.committed)
        again.run(len(history()), written=None)
        assert any('"rule":"nonfinite"' in line for line in again.issues)


def test_default_specs_are_those_of_the_catalogue() -> None:
    running = [rule.meta.name for rule in built_in() if rule.meta.by_default]
    assert [spec.name for spec in rule_specs()] == running
