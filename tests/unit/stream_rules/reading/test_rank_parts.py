"""Models whose parts are on several ranks: each rule on tensors reads every part once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from support.records.counted import add
from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import MAX_RECORD_BYTES
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.packing import unpack
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.reading.rank_parts import KEPT_STEPS, MAX_SIZE, SILENT_STEPS, Parts
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.testing import Numbers, RunBuilder, issues_of, only

LAYERS = tuple(f"l{i}.weight" for i in range(6))


class Ranks:
    """A run of some ranks; each has a part of the model, or all have the same. `sick` None: all."""

    def __init__(self, sick: int | None, ranks: int = 2, *, alike: bool = False) -> None:
        self.run = RunBuilder(world_size=ranks)
        self.sick, self.ranks, self.alike = sick, ranks, alike
        for rank in range(ranks):
            self.run.started(rank=rank)

    def add(
        self,
        step: int,
        collection: str,
        rows: Sequence[str],
        columns: Mapping[str, object] | None = None,
        counts: Mapping[str, object] | None = None,
        well: Mapping[str, object] | None = None,
    ) -> None:
        """A summary of each rank: `columns` and `counts` of the sick one, `well` in their place
        for the others."""
        for rank in range(self.ranks):
            self.run.steps([step], rank=rank, loss=2.0, columns={"lr.0": 1e-3})
        for rank in range(self.ranks):
            mark = "" if self.alike else f"@pp{rank}"
            names = [row.replace("@", mark) if "@" in row else row + mark for row in rows]
            n = len(names)
            table, counted = (
                {
                    name: np.broadcast_to(
                        np.asarray(
                            (well or {}).get(name, v) if self.sick not in (None, rank) else v, float
                        ),
                        n,
                    ).tolist()
                    for name, v in (what or {}).items()
                }
                for what in (columns, counts)
            )
            add(self.run, step, collection, names, table, counted, rank=rank)


def vanishing(ranks: Ranks) -> None:
    for i in range(8):
        numbers = {"l1": 1e-9, "l2": 1.0}
        ranks.add(10 * i, "gradients", LAYERS, numbers, {"numel": 100}, {"l1": 100.0})


def updates(ranks: Ranks) -> None:
    for i in range(10):
        ranks.add(
            10 * i,
            "updates",
            LAYERS,
            {"update_l2": 0.5, "l2": 1.0},
            {"numel": 100},
            {"update_l2": 0.001},
        )


def unchanged(ranks: Ranks) -> None:
    for i in range(6):
        ranks.add(10 * i, "gradients", LAYERS, {"l2": 1.0}, {"numel": 100})
        moves = [1 + 0.001 * i * (row != 3) for row in range(6)]
        well = {"l2": 1 + 0.001 * i}
        ranks.add(10 * i, "weights", LAYERS, {"l2": moves, "mean": 0.1}, {"numel": 100}, well)


def dead(ranks: Ranks) -> None:
    for i in range(5):
        ranks.add(100 * i, "activations", ["relu"], {"dead": 0.9}, {"numel": 100}, {"dead": 0.1})


def saturated(ranks: Ranks) -> None:
    for i in range(3):
        counts = {"order": [1, 2], "numel": 100}
        well = {"saturated": 0.1}
        ranks.add(1 + 100 * i, "activations", ["a", "b"], {"saturated": [0.9, 0.1]}, counts, well)


def spreads(ranks: Ranks) -> None:
    numbers = {"std": [3.0, 40.0, 500.0], "dead": 0.0}
    ranks.add(1, "activations", ["a", "b", "c"], numbers, {"order": [0, 1, 2]}, {"std": 1.0})


def zeros(ranks: Ranks) -> None:
    for i in range(3):
        counts = {"numel": 100, "zeros": [100, 0]}
        ranks.add(10 * i, "weights", ["a", "b"], {"l2": 1.0}, counts, {"zeros": 0})


def variance(ranks: Ranks) -> None:
    for i in range(3):
        ranks.add(10 * i, "weights", ["a"], {"std": 2.0}, {"numel": 100}, {"std": 1.0})


def underflow(ranks: Ranks) -> None:
    for i in range(4):
        numbers = {"underflow": 0.5, "overflow": 0.0}
        ranks.add(10 * i, "gradients", ["a"], numbers, {"numel": 1000}, {"underflow": 0.0})


def no_gradient(ranks: Ranks) -> None:
    counts = {
        "numel": 100,
        "steps": 5,
        "called": 3,
        "silent_calls": 0,
        "watched": 3,
        "longest": 0,
        "had": 0,
        "place": [0, 1],
        "trainable": 8,
    }
    ranks.add(4, "no_gradient", ["first", "second"], {}, counts, {"steps": 1})


def empty_state(ranks: Ranks) -> None:
    ranks.add(0, "gradients", ["a.weight"], {"absmax": 1.0}, {"numel": 100})
    rows = ["a.weight@.exp_avg", "a.weight@.exp_avg_sq"]
    ranks.add(0, "optimizer_state", rows, {}, {"numel": 100, "zeros": 100}, {"zeros": 0})


def attention(ranks: Ranks) -> None:
    for i in range(4):
        numbers = {"qk_bound": 400.0, "logit_max": 150.0, "entropy": 2.0, "entropy_share": 0.5}
        well = {"qk_bound": 12.0, "logit_max": 4.0}
        ranks.add(1 + 100 * i, "attention", ["b.0", "b.1"], numbers, {"numel": 4096}, well)


def drift(ranks: Ranks) -> None:
    add(ranks.run, 0, "labels", ["0", "1"], counts={"labels": [5, 5]})
    for i, level in enumerate([4.0, 300.0, 400.0]):
        numbers = {"log_z": level, "log_z_max": level + 1}
        well = {"log_z": 4.0, "log_z_max": 5.0}
        ranks.add(100 * i, "logits", ["head"], numbers, {"numel": 256}, well)


def experts(ranks: Ranks) -> None:
    for i in range(4):
        counts = {"numel": 1000, **{f"expert.{j}": 14 if j else 902 for j in range(8)}}
        well = {f"expert.{j}": 125 for j in range(8)}
        numbers = {"max_over_mean": 7.2, "router_z": 1.0}
        ranks.add(
            1 + 100 * i, "routers", ["router"], numbers, counts, {**well, "max_over_mean": 1.0}
        )


def embeddings(ranks: Ranks) -> None:
    for i, ratio in enumerate([3.0, 80.0, 90.0, 95.0]):
        numbers = {"row_norm_mean": 1.0, "row_norm_max": ratio}
        counts = {"numel": 500, "row_of_max": 17}
        ranks.add(1 + 100 * i, "embeddings", ["table"], numbers, counts, {"row_norm_max": 2.0})


SICK: Mapping[str, tuple[Callable[[Ranks], None], dict[str, object]]] = {
    "vanishing_gradient": (vanishing, {}),
    "weight_update_ratio": (updates, {}),
    "unchanged_tensor": (unchanged, {}),
    "dead_relu": (dead, {}),
    "saturated_activation": (saturated, {}),
    "poor_weight_initialization": (spreads, {}),
    "all_zero": (zeros, {"tensors": ("weights/*",)}),
    "tensor_variance": (variance, {"tensors": ("weights/*",), "max_threshold": 3.0}),
    "low_precision_range": (underflow, {}),
    "no_gradient": (no_gradient, {}),
    "dead_optimizer_state": (empty_state, {}),
    "attention_logit_growth": (attention, {}),
    "logit_drift": (drift, {}),
    "moe_imbalance": (experts, {}),
    "embedding_norm_growth": (embeddings, {}),
}


def specs_of(rule: str) -> tuple[RuleSpec, ...]:
    found = built_in().get(rule)
    params = found.meta.params.model_validate(SICK[rule][1])
    return (RuleSpec(name=rule, rule=found, params=params),)


def fired(rule: str, ranks: Ranks) -> list[IssueFiring]:
    SICK[rule][0](ranks)
    found = issues_of(ranks.run.records, specs=specs_of(rule))
    return [issue for issue in found if issue.state == "firing"]


@pytest.mark.parametrize("sick", [0, 1, 2])
@pytest.mark.parametrize("rule", SICK)
def test_a_part_that_is_sick_is_seen_on_whichever_rank_it_is(rule: str, sick: int) -> None:
    issues = fired(rule, Ranks(sick, 3))
    assert len({issue.branch for issue in issues}) == len(issues)
    (issue, *_) = issues
    assert issue.first_rank in (sick, None)
    assert f"@pp{sick}" in issue.subject.name or issue.first_rank == sick


@pytest.mark.parametrize("rule", SICK)
def test_ranks_that_have_the_same_are_read_once(rule: str) -> None:
    assert fired(rule, Ranks(1, alike=True)) == []


@pytest.mark.parametrize("rule", SICK)
def test_a_fault_of_all_parts_is_one_issue(rule: str) -> None:
    one = fired(rule, Ranks(0, 1))
    assert [i.branch for i in fired(rule, Ranks(None, 3))] == [i.branch for i in one]


def test_all_rules_that_read_one_rank_are_tried() -> None:
    by_part = {name for name in built_in().names() if built_in().get(name).by_part}
    assert by_part == set(SICK)


@pytest.mark.parametrize("rule", ["dead_relu", "vanishing_gradient"])
def test_a_restart_in_the_middle_changes_nothing(rule: str) -> None:
    ranks = Ranks(1, 3)
    SICK[rule][0](ranks)
    specs, records = specs_of(rule), ranks.run.records
    once = PartitionEngine(specs)
    whole = [told for record in records for told in once.apply(record)]
    assert whole
    for cut in range(8, len(records), 9):
        first, second = PartitionEngine(specs), PartitionEngine(specs)
        told = [one for record in records[:cut] for one in first.apply(record)]
        ((partition, state, run),) = first.runs()
        saved = run.snapshots(next_offset=cut, clock_ms=state.clock_ms, software="test")
        second.adopt(partition, "made", {s.rule: s for s in saved}, next_offset=cut)
        told += [one for record in records[cut:] for one in second.apply(record)]
        assert told == whole


def test_an_episode_is_over_when_no_part_is_sick() -> None:
    ranks = Ranks(1)
    dead(ranks)
    for i in range(5, 8):
        ranks.add(100 * i, "activations", ["relu"], {"dead": 0.1}, {"numel": 100})
    states = [i.state for i in issues_of(ranks.run.records, specs=only("dead_relu"))]
    assert states == ["firing", "resolved"]


# -- who is read ------------------------------------------------------------------------------


def frame(rank: int, step: int, *rows: str, ranks: int = 4) -> TensorFrame:
    run = RunBuilder(world_size=ranks)
    run.tensors(step, "gradients", rows, rank=rank)
    return TensorFrame.decode(run.records[-1].value or b"")


def test_names_are_read_of_the_lowest_rank_that_has_them() -> None:
    parts = Parts()
    assert parts.reads(frame(2, 0, "c", "d"))
    assert parts.reads(frame(1, 0, "a", "b"))
    assert parts.reads(frame(0, 0, "a", "b"))
    assert parts.ranks() == {0, 2}
    assert not parts.reads(frame(1, 1, "a", "b"))
    assert not parts.reads(frame(3, 1, "c", "d"))
    assert parts.reads(frame(2, 1, "c", "d"))


def test_a_rank_that_vanishes_is_replaced_by_the_next_that_has_its_names() -> None:
    parts = Parts()
    for step in range(0, 100, 10):
        assert parts.reads(frame(0, step, "a"))
        assert not parts.reads(frame(1, step, "a"))
    assert not parts.reads(frame(1, 90 + SILENT_STEPS, "a"))
    assert parts.reads(frame(1, 91 + SILENT_STEPS, "a"))
    assert parts.ranks() == {1}


def test_a_name_that_moves_to_another_rank_is_read_there_soon() -> None:
    parts = Parts()
    parts.reads(frame(0, 0, "a", "b"))
    parts.reads(frame(1, 0, "b"))
    found = []
    for step in range(1, 3 * KEPT_STEPS):
        parts.reads(frame(0, step, "a"))
        found.append(parts.reads(frame(1, step, "b")))
    assert not found[0]
    assert found[-1]


def test_what_is_remembered_has_a_bound() -> None:
    parts = Parts()
    names = [[f"{rank}.{i}" for i in range(1_000)] for rank in range(12)]
    read = [parts.reads(frame(rank, 0, *rows)) for rank, rows in enumerate(names)]
    assert 5 < sum(read) < 12
    assert read[0]


def test_a_rank_whose_names_become_too_many_is_read_no_more() -> None:
    parts = Parts()
    long = "n" * 300
    assert parts.reads(frame(0, 0, "a"))
    assert parts.reads(frame(1, 0, "b"))
    many = [f"{long}{i}" for i in range(MAX_SIZE // 300)]
    assert not parts.reads(frame(1, 1, *many))
    assert parts.ranks() == {0}
    assert not parts.reads(frame(1, 2, "b"))
    assert parts.reads(frame(0, 3, *many)), "the lowest one is read in any case"


@pytest.mark.parametrize(("ranks", "names", "length"), [(24, 200, 70), (20, 25, 1_200)])
def test_the_largest_state_of_a_rule_fits_into_a_record(
    ranks: int, names: int, length: int
) -> None:
    """Each rank has other names, as many as are read or more, with all statistics."""
    run = RunBuilder(world_size=ranks)
    statistics = ("min", "max", "absmax", "mean", "std", "l1", "l2")
    for step in range(2):
        for rank in range(ranks):
            rows = [f"{i}@shard{rank}".rjust(length, "n") for i in range(names)]
            for collection in ("gradients", "weights", "updates"):
                columns: dict[str, Numbers] = {name: 1.0 + step for name in statistics}
                if collection == "updates":
                    columns["update_l2"] = 0.1
                run.tensors(step, collection, rows, rank=rank, columns=columns)
        for rank in range(ranks):
            run.tensors(step, "activations", [f"relu@{rank}"], rank=rank, columns={"dead": 0.1})
    by_part = [name for name in built_in().names() if built_in().get(name).by_part]
    engine = PartitionEngine([spec for name in by_part for spec in only(name)])
    for record in run.records:
        engine.apply(record)
    state = engine.run(run.run_id)
    assert state is not None
    held = state.state.parts.held["train|weights"]
    assert ranks / 2 < len(held) < ranks
    found = state.snapshots(next_offset=1, clock_ms=1, software="")
    largest = max(len(snapshot.encode()) for snapshot in found)
    # Packed, as names are alike. The worst names, which cannot be packed, fit as well.
    whole = max(len(unpack(instance.snapshot())) for instance in state.instances)
    assert largest < MAX_RECORD_BYTES / 2 < whole < MAX_RECORD_BYTES - 65_536


def test_scalars_reach_the_copy_of_their_rank_and_those_of_the_leader_reach_all() -> None:
    """Of 16 ranks with a part each: the work grows with the ranks, not with their square."""
    ranks = 16
    made = Ranks(None, ranks)
    made.add(0, "weights", ("a@",), {"l2": 1.0})
    engine = PartitionEngine(only("unchanged_tensor"))
    for record in made.run.records:
        engine.apply(record)
    state = engine.run(made.run.run_id)
    assert state is not None
    calls: list[tuple[int, int]] = []
    (instance,) = (i for i in state.instances if i.spec.name == "unchanged_tensor")
    readers = {0: instance.rule, **instance._copies}
    for number, rule in readers.items():

        def on_steps(frame: StepFrame, at: object, number: int = number) -> tuple[()]:
            calls.append((frame.origin.rank, number))
            return ()

        rule.on_steps = on_steps  # type: ignore[method-assign]
    before = len(made.run.records)
    for rank in range(ranks):
        made.run.steps([1], rank=rank, loss=1.0, columns={"lr.0": 1e-3})
    made.run.steps([1], rank=5, columns={"lr.7": 1.0})
    for record in made.run.records[before:]:
        engine.apply(record)
    everybody = [(0, number) for number in range(ranks)]
    own = [(rank, number) for rank in range(1, ranks) for number in (0, rank)]
    assert calls == [*everybody, *own, *((5, number) for number in range(ranks))]


def test_what_is_derived_is_no_part_of_a_snapshot() -> None:
    parts = Parts()
    for rank in range(3):
        parts.reads(frame(rank, 0, f"n{rank}"))
    again = load_state(Parts, dump_state(parts))
    assert b"covered" not in dump_state(parts)
    assert again.ranks() == parts.ranks() == {0, 1, 2}
    assert not again.reads(frame(2, 1, "n0", "n1"))


def test_one_rank_needs_no_memory() -> None:
    parts = Parts()
    assert parts.reads(frame(0, 0, "a", ranks=1))
    assert not parts.held


def test_every_rule_with_whole_summaries_says_how_it_reads_ranks() -> None:
    """A rule that puts summaries together reads by part, or is one of those whose rows are no names
    of tensors: of these, the lowest rank that has any is enough."""
    others = {
        "check_input_images",
        "class_imbalance",
        "collapsed_predictions",
        "confusion",
        "differs_from_run",
        "feature_importance_overweight",
        # The weights of one rank are witness enough that a step has ruined the model.
        "loss_diverged",
        "loss_not_decreasing",
        "nlp_sequence_ratio",
        "tree_depth",
    }
    found = set()
    for name in built_in().names():
        rule: type[AnyRule] = built_in().get(name)
        source = inspect.getsource(inspect.getmodule(rule) or rule)
        if not rule.by_part and any(
            word in source
            for word in ("TensorRowRule", "LowestRankRows", "WarmStart", "ClassTotals")
        ):
            found.add(name)
    assert found == others
