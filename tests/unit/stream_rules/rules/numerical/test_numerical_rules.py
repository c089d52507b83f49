"""Saturation, bad beginnings, zeros, variances, low precision, loss scalers and replicas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tocsin.bus.port import Record
from tocsin.schemas.records.frames import RecordOrigin, TensorFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

NAN = math.nan


def started(world_size: int = 1) -> RunBuilder:
    run = RunBuilder(world_size=world_size, step_ms=10)
    for rank in range(world_size):
        run.started(rank=rank)
    return run


def quiet(records: list[Record], rule: str, **params: object) -> None:
    found = issues_of(records, specs=only(rule, catalogue=None, **params))
    assert [issue.reason for issue in found] == []


def fires(records: list[Record], rule: str, branch: str = "", **params: object) -> IssueFiring:
    found = assert_fires(records, rule, specs=only(rule, catalogue=None, **params))
    assert found.branch == branch
    return found


def frame(
    run: RunBuilder,
    step: int,
    collection: str,
    rows: Mapping[str, Sequence[float]],
    columns: tuple[str, ...],
    counts: Mapping[str, Sequence[int]] | None = None,
    *,
    rank: int = 0,
) -> None:
    """A table as the training process sends it, with these columns alone."""
    counts = counts or {}
    run.add(
        TensorFrame(
            origin=RecordOrigin(
                run_id=run.run_id,
                incarnation=run.incarnation,
                rank=rank,
                world_size=run.world_size,
            ),
            step=step,
            collection=collection,
            rows=tuple(rows),
            columns=columns,
            values=np.array(list(rows.values()), np.float32).reshape(len(rows), len(columns)),
            count_columns=tuple(counts),
            counts=np.array(list(counts.values()), np.uint64).reshape(len(counts), len(rows)).T,
        ),
        rank=rank,
    )


# -- saturated_activation ----------------------------------------------------------------------


def gates(run: RunBuilder, step: int, *shares: float, order: int = 0) -> None:
    rows = {f"act{i}": (share,) for i, share in enumerate(shares)}
    run_order = [order + 2 * i for i in range(len(shares))]
    frame(run, step, "activations", rows, ("saturated",), {"order": run_order})


def after(run: RunBuilder, step: int) -> None:
    """A module of another kind, behind the gates."""
    frame(run, step, "activations", {"gelu": (1.0,)}, ("std",), {"order": [99]})


def test_a_layer_that_is_saturated_from_the_beginning_fires_at_once() -> None:
    run = started()
    gates(run, 1, 0.0, 0.4, 0.9)
    issue = fires(run.records, "saturated_activation", "hidden")
    assert (issue.subject.name, issue.severity, issue.first_step) == ("act1", "warning", 1)
    assert issue.evidence.also == ("act2",)


def test_one_that_becomes_so_has_to_be_so_twice() -> None:
    run = started()
    for step, share in ((1, 0.0), (100, 0.5), (200, 0.1), (300, 0.5)):
        gates(run, step, share)
        after(run, step)
    quiet(run.records, "saturated_activation")
    gates(run, 305, 0.6)
    issue = fires(run.records, "saturated_activation", "hidden")
    assert issue.first_step == 300


def test_the_last_module_may_have_learned_to_be_sure() -> None:
    run = started()
    for step, share in ((1, 0.0), (100, 0.5), (200, 0.5)):
        gates(run, step, 0.0, share)
    assert fires(run.records, "saturated_activation", "output").severity == "info"


def test_a_softmax_is_only_told() -> None:
    run = started()
    frame(run, 1, "activations", {"soft": (0.8, 0.1)}, ("saturated", "entropy"), {"order": [3]})
    assert fires(run.records, "saturated_activation", "softmax").severity == "info"


def test_it_is_over_when_no_layer_is_saturated_any_more() -> None:
    run = started()
    gates(run, 1, 0.9)
    gates(run, 100, NAN)
    gates(run, 200, 0.1)
    states = [issue.state for issue in issues_of(run.records, specs=only("saturated_activation"))]
    assert states == ["firing", "resolved"]


def test_the_limit_of_the_reference_is_half_a_layer() -> None:
    run = started()
    gates(run, 1, 0.4)
    quiet(run.records, "saturated_activation", threshold_layer=50.0, for_summaries=1)


@pytest.mark.parametrize("columns", [("dead",), ("std",), ()])
def test_other_kinds_and_empty_frames_are_no_business_of_it(columns: tuple[str, ...]) -> None:
    run = started()
    frame(run, 1, "activations", {"a": [1.0] * len(columns)}, columns, {"order": [0]})
    frame(run, 1, "activations", {}, ("saturated",), {})
    quiet(run.records, "saturated_activation")


# -- dead_relu -----------------------------------------------------------------------------------


def test_a_layer_without_any_active_unit_is_dead_at_once() -> None:
    run = started()
    rows = {"relu1": (0.6,), "relu2": (1.0,)}
    frame(run, 1, "activations", rows, ("dead",), {"order": [0, 1]})
    assert fires(run.records, "dead_relu").subject.name == "relu2"
    quiet(run.records, "dead_relu", threshold_at_once=100.0)


# -- poor_weight_initialization ------------------------------------------------------------------


def spreads(run: RunBuilder, step: int, *stds: float) -> None:
    rows = {f"layer{i}": (std, 0.0) for i, std in enumerate(stds)}
    frame(run, step, "activations", rows, ("std", "dead"), {"order": range(len(stds))})


def ranges(run: RunBuilder, step: int, *widths: float, largest: float = 0.1) -> None:
    """Gradients of these ranges in backward order; the last layer's bias has the largest one."""
    rows = {"head.bias": (-largest / 2, largest / 2, largest / 3, largest)}
    for i, width in enumerate(widths):
        rows[f"w{i}"] = (-width / 2, width / 2, width / 3, width)
    frame(run, step, "gradients", rows, ("p05", "p95", "std", "absmax"))


def test_a_signal_that_grows_from_layer_to_layer() -> None:
    run = started()
    spreads(run, 1, 3.0, 40.0, 500.0)
    issue = fires(run.records, "poor_weight_initialization", "variance_ratio")
    assert issue.subject.name == "layer2"
    assert "layer0" in issue.reason
    assert issue.evidence.also == ("layer0", "layer1")


@pytest.mark.parametrize(
    ("gradient", "rule"), [(0.1, "weight_update_ratio"), (1e4, "poor_weight_initialization")]
)
def test_a_signal_that_the_first_update_has_made_is_not_that_of_the_initial_weights(
    gradient: float, rule: str
) -> None:
    """Of gradients that are larger than the weights, it is theirs: they make the update large."""
    run = started()
    names = [f"w{i}" for i in range(8)]
    rows = {name: (-1e-3, 1e-3, 1e-3, 1e-3, gradient) for name in names}
    frame(run, 0, "gradients", rows, ("p05", "p95", "std", "absmax", "l2"))
    updates = {name: (9.0, 10.0) for name in names}
    frame(run, 0, "updates", updates, ("update_l2", "l2"))
    run.steps([0, 1], loss=[2.3, 80.0])
    spreads(run, 1, 3.0, 40.0, 500.0)
    rules = (*only("poor_weight_initialization"), *only("weight_update_ratio"))
    last = {issue.use: issue for issue in issues_of(run.records, specs=rules)}
    assert last["weight_update_ratio"].branch == "large"
    assert {use for use, one in last.items() if one.consequence_of is None} == {rule}
    assert ("poor_weight_initialization" in last) == (rule == "poor_weight_initialization")


def test_one_that_is_all_but_lost() -> None:
    run = started()
    spreads(run, 1, 1.0, 1e-2, 1e-4)
    issue = fires(run.records, "poor_weight_initialization", "variance_ratio")
    assert issue.subject.name == "layer2"


@pytest.mark.parametrize(
    "stds",
    [
        (1.0, 0.02),  # PyTorch's own weights, eight convolutions deep
        (0.1, 5.0),  # large, but not as such
        (70.0, 2.0),  # inputs that are not normalised
        (1.0, 0.0),  # a branch that begins at zero
        (NAN, 1.0),
        (500.0,),
    ],
)
def test_variances_as_they_are_in_healthy_models(stds: tuple[float, ...]) -> None:
    run = started()
    spreads(run, 1, *stds)
    quiet(run.records, "poor_weight_initialization")


def test_later_layers_may_be_as_they_like() -> None:
    run = started()
    spreads(run, 1, 1.0, 1.0)
    spreads(run, 100, 1.0, 500.0)
    quiet(run.records, "poor_weight_initialization")


def test_a_run_that_goes_on_from_another_was_not_initialised() -> None:
    run = started()
    run.steps([5000], loss=2.0)
    spreads(run, 5001, 1.0, 500.0)
    ranges(run, 5000, 0, 0, 0)
    ranges(run, 5010, 0, 0, 0)
    quiet(run.records, "poor_weight_initialization")


def test_it_is_over_when_the_layers_have_come_together() -> None:
    run = started()
    spreads(run, 1, 1.0, 500.0)
    spreads(run, 100, 1.0, 500.0)
    spreads(run, 200, 1.0, 5.0)
    spreads(run, 300, 1.0, 500.0)
    found = issues_of(run.records, specs=only("poor_weight_initialization"))
    assert [issue.state for issue in found] == ["firing", "resolved"]


def test_gradients_that_are_next_to_nothing_twice() -> None:
    run = started()
    ranges(run, 0, 1e-9, 1e-12, 1e-12)
    quiet(run.records, "poor_weight_initialization")
    ranges(run, 10, 1e-9, 1e-12, 1e-12)
    issue = fires(run.records, "poor_weight_initialization", "narrow_gradients")
    assert (issue.subject.name, issue.first_step) == ("w2", 0)
    assert issue.evidence.followed == 2


def test_gradients_that_vanish_beside_one_that_explodes_are_another_matter() -> None:
    run = started()
    ranges(run, 0, 1e-2, 1e-2, 1e-2)
    ranges(run, 5, 1e-2, 1e-2, 1e-2, largest=1e9)
    ranges(run, 6, 1e-2, 1e-2, 1e-2, largest=1e9)
    quiet(run.records, "poor_weight_initialization")


def test_a_last_layer_that_begins_at_zero_lets_gradients_pass_later() -> None:
    run = started()
    ranges(run, 0, 1e-3, 0, 0, 0, 0)
    ranges(run, 10, 1e-3, 1e-9, 1e-9, 1e-9, 1e-9)
    quiet(run.records, "poor_weight_initialization")


def test_small_losses_have_small_gradients_everywhere() -> None:
    run = started()
    for step in (0, 10):
        ranges(run, step, 1e-10, 1e-10, 1e-10, largest=1e-9)
    quiet(run.records, "poor_weight_initialization")


def test_a_gradient_of_few_rows_is_not_narrow() -> None:
    run = started()
    for step in (0, 10):
        rows = {f"table{i}": (0.0, 0.0, 1e-3, 0.1) for i in range(4)}
        frame(run, step, "gradients", rows, ("p05", "p95", "std", "absmax"))
    quiet(run.records, "poor_weight_initialization")


def test_losses_that_are_all_the_same() -> None:
    run = started()
    ranges(run, 0, 0.1)
    run.steps(range(9), loss=2.302585, columns={"lr.0": 0.1})
    quiet(run.records, "poor_weight_initialization")
    run.steps(range(9, 30), loss=2.302585, columns={"lr.0": 0.1})
    issue = fires(run.records, "poor_weight_initialization", "flat_loss")
    assert issue.first_step == 0
    assert issue.step == 9


def flat(change: float = 0.0, rate: float = 0.1, loss: float = 2.0, first: int = 0) -> RunBuilder:
    run = started()
    ranges(run, first, 0.1)
    losses = loss - change * np.arange(30)
    run.steps(range(first, first + 30), loss=losses, columns={"lr.0": rate})
    return run


def test_losses_that_are_not_flat() -> None:
    quiet(flat(change=1e-5).records, "poor_weight_initialization")
    quiet(flat(rate=0.0).records, "poor_weight_initialization")
    quiet(flat(loss=0.0).records, "poor_weight_initialization")
    quiet(flat(loss=NAN).records, "poor_weight_initialization")
    quiet(flat(first=500).records, "poor_weight_initialization")


def test_a_loss_that_has_been_learnt_is_not_flat() -> None:
    run = started()
    ranges(run, 0, 0.1)
    run.steps(range(30), loss=[0.69, *[0.3] * 29], columns={"lr.0": 1.0})
    quiet(run.records, "poor_weight_initialization")


def test_a_rate_is_that_of_its_step_where_rows_come_again() -> None:
    run = started()
    ranges(run, 0, 0.1)
    run.steps(range(5), per_frame=5, loss=2.0, columns={"lr.0": 0.1})
    rates = [*[0.1] * 5, *[0.0] * 5]
    run.steps(range(10), per_frame=10, loss=2.0, columns={"lr.0": rates})
    quiet(run.records, "poor_weight_initialization")


def test_the_reference_calls_a_loss_flat_that_does_not_fall() -> None:
    run = flat(change=-0.01)
    reference = {"relative": False, "flat_within": None, "patience": 5}
    fires(run.records, "poor_weight_initialization", "flat_loss", **reference)


# -- all_zero ------------------------------------------------------------------------------------


def test_a_model_without_gradients() -> None:
    run = started()
    run.steps(range(10), loss=2.0, gradient_norm=[1.0] * 5 + [0.0] * 5)
    issue = fires(run.records, "all_zero", "gradients")
    assert (issue.first_step, issue.step) == (5, 7)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [
        (2.0, [0.0, 0.0, 1.0] * 4),
        (0.0, [0.0] * 12),
        ([5.0, *[0.01] * 11], [0.0] * 12),
        (2.0, [NAN] * 12),
    ],
)
def test_a_model_with_some_or_without_a_reason_for_them(
    loss: float | list[float], norm: list[float]
) -> None:
    run = started()
    run.steps(range(12), loss=loss, gradient_norm=norm)
    quiet(run.records, "all_zero")


def zeros(run: RunBuilder, step: int, collection: str, rows: dict[str, int]) -> None:
    names = {name: () for name in rows}
    frame(
        run,
        step,
        collection,
        names,
        (),
        {"numel": [100] * len(rows), "zeros": list(rows.values())},
    )


def test_summaries_of_gradients_are_looks_too() -> None:
    run = started()
    for step in (0, 10, 20):
        run.steps([step], loss=2.0)
        zeros(run, step, "gradients", {"a": 100, "b": 100 if step < 20 else 99})
    quiet(run.records, "all_zero")
    for step in (30, 40, 50):
        run.steps([step], loss=2.0, gradient_norm=0.0)
        zeros(run, step, "gradients", {"a": 100, "b": 100})
    issue = fires(run.records, "all_zero", "gradients")
    assert (issue.first_step, issue.step) == (30, 50)


def test_a_tensor_that_was_named() -> None:
    run = started()
    for step in (0, 10, 20):
        zeros(run, step, "weights", {"a": 100, "b": 80, "c.bias": 100})
    quiet(run.records, "all_zero")
    watched = ("weights/a*", "weights/b")
    issue = fires(run.records, "all_zero", "tensors", tensors=watched)
    assert (issue.subject.name, issue.evidence.followed) == ("a", 0)
    issue = fires(run.records, "all_zero", "tensors", tensors=watched, threshold=70.0)
    assert issue.evidence.also == ("b",)


# -- tensor_variance -----------------------------------------------------------------------------


def test_variances_outside_of_the_limits() -> None:
    run = started()
    frame(run, 0, "weights", {"a": (1.0,), "b": (2.0,), "c": (0.1,)}, ("std",))
    quiet(run.records, "tensor_variance")
    quiet(run.records, "tensor_variance", min_threshold=0.001, max_threshold=5.0)
    quiet(run.records, "tensor_variance", max_threshold=3.0, tensors=("gradients/*",))
    issue = fires(run.records, "tensor_variance", "above", max_threshold=3.0)
    assert issue.subject.name == "b"
    issue = fires(run.records, "tensor_variance", "below", min_threshold=0.02)
    assert issue.subject.name == "c"


def test_variances_come_back() -> None:
    run = started()
    for step, std in enumerate((1.0, 3.0, NAN, 3.0, 1.0)):
        frame(run, step, "weights", {"a": (std,)}, ("std",))
    found = issues_of(run.records, specs=only("tensor_variance", max_threshold=3.0))
    assert [issue.state for issue in found] == ["firing", "resolved"]


# -- low_precision_range -------------------------------------------------------------------------


def half(run: RunBuilder, step: int, low: Sequence[float], high: Sequence[float]) -> None:
    rows = {f"w{i}": pair for i, pair in enumerate(zip(low, high, strict=True))}
    frame(
        run,
        step,
        "gradients",
        rows,
        ("underflow", "overflow"),
        {"numel": [10 if i else 1000 for i in range(len(rows))]},
    )


@pytest.mark.parametrize(
    ("lows", "highs", "branch"),
    [
        ([(0.5, 0.0)] * 3, [(0.0, 0.0)] * 3, "underflow"),
        ([(0.4, 0.0), (0.6, 0.0), (0.8, 0.0)], [(0.0, 0.0)] * 3, "underflow"),
        ([(0.0, 0.0)] * 3, [(0.0, 0.002)] * 3, "overflow"),
    ],
)
def test_gradients_at_the_ends_of_their_type(
    lows: list[tuple[float, ...]], highs: list[tuple[float, ...]], branch: str
) -> None:
    run = started()
    for i, (low, high) in enumerate(zip(lows, highs, strict=True)):
        half(run, 10 * i, low, high)
    issue = fires(run.records, "low_precision_range", branch)
    assert issue.first_step == 0
    assert issue.subject.name == ("w0" if branch == "underflow" else "w1")


@pytest.mark.parametrize(
    "lows",
    [
        [(0.1, 1.0)] * 5,  # one small tensor does not make the whole
        [(0.5, 0.0), (0.5, 0.0), (0.1, 0.0)] * 2,
        [(0.9, 0.0), (0.6, 0.0), (0.4, 0.0)],  # on the way back
        [(NAN, 0.0)] * 3,
    ],
)
def test_gradients_that_are_well(lows: list[tuple[float, ...]]) -> None:
    run = started()
    for i, low in enumerate(lows):
        half(run, 10 * i, low, (0.0, 0.0))
    run.tensors(10 * len(lows), "gradients", ["w0"])
    quiet(run.records, "low_precision_range")


# -- scaler_skips --------------------------------------------------------------------------------


def scaled(run: RunBuilder, skips: Sequence[int], first: int = 0, scale: float = 1024.0) -> None:
    columns = {"lr.0": 0.1, "scaler_scale": scale}
    for step, skipped in enumerate(skips, first):
        run.steps([step], loss=2.0, columns={**columns, "scaler_skipped": skipped})


def test_some_skips_are_normal() -> None:
    run = started()
    scaled(run, [12, 0, 0, 1, *[0] * 500, 1, 1, *[0] * 100])
    quiet(run.records, "scaler_skips")


def test_too_many_skips() -> None:
    run = started()
    scaled(run, [3, *[0] * 50, *[1] * 20])
    issue = fires(run.records, "scaler_skips", "share")
    assert (issue.first_step, issue.step) == (51, 61)


def test_a_scaler_that_never_makes_a_step_says_so_of_the_step_that_does_not_come() -> None:
    run = started()
    for skipped in (10, 20):
        run.steps([0], columns={"scaler_skipped": float(skipped)})
    issue = fires(run.records, "scaler_skips", "share")
    assert "no step has been completed" in issue.reason


def test_a_scale_that_is_used_up() -> None:
    run = started()
    scaled(run, [0] * 10, scale=1.0)
    quiet(run.records, "scaler_skips")
    scaled(run, [0] * 10, first=10, scale=0.5)
    issue = fires(run.records, "scaler_skips", "floor")
    assert issue.first_step == 10
    scaled(run, [0] * 40, first=20)
    states = [issue.state for issue in issues_of(run.records, specs=only("scaler_skips"))]
    assert states == ["firing", "resolved"]


# -- replica_divergence --------------------------------------------------------------------------

ROWS = ("embed", "body", "head")


def sums(
    run: RunBuilder, step: int, by_rank: dict[int, Sequence[int]], rows: Sequence[str] = ROWS
) -> None:
    for rank, values in by_rank.items():
        names = {name: () for name in rows}
        frame(run, step, "checksums", names, (), {"checksum": values}, rank=rank)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_odd_one_of_three_is_named(order: tuple[int, ...]) -> None:
    run = started(3)
    for step in (0, 100):
        sums(run, step, dict.fromkeys(order, (1, 2 + step, step)))
    bad = {0: (1, 2, 9), 1: (1, 7, 9), 2: (1, 2, 9)}
    sums(run, 200, {rank: bad[rank] for rank in order})
    issue = fires(run.records, "replica_divergence", "diverged")
    assert (issue.severity, issue.stop_worthy) == ("critical", False)
    assert (issue.first_rank, issue.first_step, issue.subject.name) == (1, 200, "rank 1")
    assert "body" in issue.reason


def test_of_two_nobody_knows_which_is_right() -> None:
    run = started(2)
    sums(run, 0, dict.fromkeys((0, 1), (1, 2, 3)))
    sums(run, 100, dict.fromkeys((0, 1), (3, 4, 5)))
    sums(run, 200, {0: (4, 5, 6), 1: (4, 0, 0)})
    issue = fires(run.records, "replica_divergence", "diverged")
    assert (issue.subject.name, issue.evidence.also) == ("body", ("head",))


@pytest.mark.parametrize("agreeing", [31, 20, 2])
def test_of_many_replicas_only_a_real_majority_names_the_others(agreeing: int) -> None:
    ranks = range(40)
    run = started(len(ranks))
    sums(run, 0, dict.fromkeys(ranks, (1, 2, 3)))
    sums(run, 100, dict.fromkeys(ranks, (3, 4, 5)))
    # Those that came first have weights of their own, each of them.
    own = len(ranks) - agreeing
    sums(run, 200, {rank: (4, 5, 100 + min(rank, own)) for rank in ranks})
    issue = fires(run.records, "replica_divergence", "diverged")
    facts = {fact.name: fact.value for fact in issue.evidence.facts}
    assert facts["different_weights"] == own + 1
    if agreeing > len(ranks) / 2:
        assert f"{own} ranks, first rank 0, have other weights than the majority" in issue.reason
    else:
        assert issue.subject.kind == "tensor"
        assert "have different weights" in issue.reason


def test_replicas_that_come_together_again() -> None:
    run = started(2)
    sums(run, 0, dict.fromkeys((0, 1), (1, 2, 3)))
    sums(run, 100, {0: (4, 5, 6), 1: (4, 5, 7)})
    sums(run, 200, {0: (5, 5, 6), 1: (5, 5, 7)})
    sums(run, 300, dict.fromkeys((0, 1), (8, 8, 8)))
    found = issues_of(run.records, specs=only("replica_divergence"))
    assert [issue.state for issue in found] == ["firing", "resolved"]


def test_ranks_that_never_had_the_same_weights_are_a_warning() -> None:
    run = started(2)
    for step in (0, 100):
        sums(run, step, {0: (1, 2, step), 1: (4, 5, step + 1)})
    issue = fires(run.records, "replica_divergence", "never_alike")
    assert (issue.severity, issue.first_step) == ("warning", 0)


def test_replicas_that_are_averaged_from_time_to_time_are_never_critical() -> None:
    run = started(2)
    for step in range(0, 800, 100):
        own = step if step in (300, 600) else step + 1
        sums(run, step, {0: (step, step, step), 1: (own, own, own)})
    found = issues_of(run.records, specs=only("replica_divergence"))
    assert {issue.branch for issue in found} == {"never_alike"}


def test_weights_that_agreed_only_until_they_moved_are_a_warning() -> None:
    # From one seed, with a learning rate of 0 in the first step; averaged at step 300.
    run = started(2)
    for step in range(0, 800, 100):
        own = step if step in (0, 300) else step + 1
        sums(run, step, {0: (step, step, step), 1: (step, step, own)})
    found = issues_of(run.records, specs=only("replica_divergence"))
    assert {(issue.branch, issue.severity) for issue in found} == {("diverged", "warning")}
    assert "but only until they first changed: head" in found[0].reason
    # A weight that must stay alike is another issue beside it.
    sums(run, 800, {0: (800, 800, 800), 1: (800, 7, 801)})
    issue = issues_of(run.records, specs=only("replica_divergence"))[-1]
    assert (issue.severity, issue.subject.name) == ("critical", "body")


def test_parts_of_a_model_and_experts_of_each_rank_are_no_replicas() -> None:
    run = started(4)
    for step in (0, 100):
        for rank in range(4):
            part = rank % 2
            names = [f"{name}@tp{part}" for name in ROWS]
            sums(run, step, {rank: (part, step, 3)}, names)
            sums(run, step + 1, {rank: (1, step, rank)})
            sums(run, step + 2, {rank: (rank,)}, ["model._flat_param"])
    quiet(run.records, "replica_divergence")


def test_a_rank_that_does_not_speak_is_not_waited_for() -> None:
    run = started(3)
    sums(run, 0, dict.fromkeys((0, 1, 2), (1, 2, 3)))
    sums(run, 100, {0: (1, 1, 1), 2: (1, 1, 2)})
    specs = only("replica_divergence")
    assert issues_of(run.records, specs=specs, until_ms=run.now_ms + 9_999) == []
    (issue,) = issues_of(run.records, specs=specs, until_ms=run.now_ms + 10_000)
    assert issue.first_step == 100


def test_the_same_summary_twice_is_one() -> None:
    run = started(2)
    sums(run, 0, dict.fromkeys((0, 1), (1, 2, 3)))
    run.again(run.records[-1])
    sums(run, 0, {0: (7, 7, 7)})
    quiet(run.records, "replica_divergence")


# -- all of them -----------------------------------------------------------------------------------


def test_a_restart_anywhere_changes_nothing() -> None:
    run = started(2)
    ranges(run, 0, 1e-9, 1e-12, 1e-12)
    ranges(run, 10, 1e-9, 1e-12, 1e-12)
    spreads(run, 1, 3.0, 40.0, 500.0)
    for step in range(3):
        gates(run, 100 * step, 0.0, 0.5)
        frame(run, step, "activations", {"s": (0.9, 0.1)}, ("saturated", "entropy"))
        half(run, 10 * step, (0.5, 0.0), (0.0, 0.002))
        zeros(run, step, "weights", {"a": 100})
        frame(run, step, "weights", {"a": (3.0,)}, ("std",))
        sums(run, 100 * step, {0: (1, 2, 3), 1: (1, 2, 3 + step)})
    run.tensors(5, "activations", ["act1"], nans={"act1": 9})
    scaled(run, [3, *[0] * 20, *[1] * 20], scale=0.5)
    run.steps(range(50, 60), loss=2.0, gradient_norm=0.0)
    for rank in (0, 1):
        run.steps([60, 61], rank=rank, loss=NAN, gradient_norm=NAN, gradient_nonfinite=3)
    run.ended()
    run.ended(rank=1)
    specs = (
        *only("nonfinite"),
        *only("saturated_activation"),
        *only("poor_weight_initialization"),
        *only("all_zero", tensors=("weights/a",)),
        *only("tensor_variance", max_threshold=3.0),
        *only("low_precision_range"),
        *only("scaler_skips"),
        *only("replica_divergence"),
    )
    whole = [told.issue.model_dump_json() for told in replay(run.records, specs)]
    assert {spec.name for spec in specs} <= {json.loads(line)["rule"] for line in whole}
    again: list[str] = []
    engine = PartitionEngine(specs)
    for at, record in enumerate(run.records, 1):
        again += [told.issue.model_dump_json() for told in engine.apply(record)]
        state = engine.run(run.run_id)
        if at % 3 or state is None:
            continue
        saved = state.snapshots(next_offset=at, clock_ms=record.append_ms, software="")
        engine = PartitionEngine(specs)
        kept = {one.rule: Snapshot.decode(one.encode()) for one in saved}
        engine.adopt(record.partition.number, run.run_id, kept, next_offset=at)
    assert again == whole
