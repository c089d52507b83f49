"""`vanishing_gradient`, `unchanged_tensor`, `weight_update_ratio`, `dead_relu` on made series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.runs import Group, RunStarted
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows, aligned, mean_abs
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

ROWS = tuple(f"l{i}.weight" for i in reversed(range(12)))
FORWARD = ROWS[::-1]
Column = list[float] | float


def run_of(
    collection: str,
    column: str,
    series: Sequence[Column],
    *,
    rows: tuple[str, ...] = ROWS,
    every: int = 10,
    rate: float = 1e-3,
) -> RunBuilder:
    run = RunBuilder()
    run.started()
    for i, values in enumerate(series):
        run.steps([i * every], loss=2.0, columns={"lr.0": rate})
        run.tensors(i * every, collection, rows, columns={column: values})
    return run


# -- vanishing_gradient (numel of made rows is 100, so l1 is 100 times the mean)

VANISHING = only("vanishing_gradient")
HALF: Column = [1.0] * 3 + [1e-9] * 6 + [1.0] * 3


def test_half_of_the_gradients_gone_for_five_summaries() -> None:
    run = run_of("gradients", "l1", [1.0, 1.0, *[HALF] * 5])
    issue = assert_fires(run.records, "vanishing_gradient", first_step=20, specs=VANISHING)
    assert (issue.severity, issue.stop_worthy, issue.step) == ("warning", False, 60)
    assert issue.subject.name == "l3.weight"
    assert issue.evidence.followed == 5


def test_all_gone_is_one_issue_of_that_form() -> None:
    issues = issues_of(run_of("gradients", "l1", [0.0] * 8).records, specs=VANISHING)
    assert [i.state for i in issues] == ["firing"]
    assert issues[0].first_step == 0


def test_the_first_layers_against_the_last() -> None:
    deep: Column = [float(x) for x in np.geomspace(1.0, 1e-5, 12)]
    deeper: Column = [float(x) for x in np.geomspace(1e3, 1e-5, 12)]
    assert_quiet(run_of("gradients", "l1", [deep] * 10).records, specs=VANISHING)
    issue = assert_fires(
        run_of("gradients", "l1", [deeper] * 10).records, "vanishing_gradient", specs=VANISHING
    )
    assert issue.subject.kind == "layer"
    assert "first layers" in issue.reason


@pytest.mark.parametrize(
    "series",
    [
        pytest.param([HALF] * 4 + [1.0] * 4, id="four summaries"),
        pytest.param([HALF, 1.0] * 10, id="every other summary"),
        pytest.param([[1.0] * 3 + [1e-9] * 5 + [1.0] * 4] * 10, id="less than half"),
        pytest.param([-1.0] * 3, id="a short run"),
    ],
)
def test_gradients_left_alone(series: list[Column]) -> None:
    assert_quiet(run_of("gradients", "l1", series).records, specs=VANISHING)


def test_a_solved_task_may_have_small_gradients() -> None:
    run = RunBuilder()
    for i in range(40):
        run.steps(range(10 * i, 10 * i + 10), loss=2.0 * 0.5**i)
        run.tensors(10 * i, "gradients", ROWS, columns={"l1": 1e-9 if i > 25 else 1.0})
    assert_quiet(run.records, specs=VANISHING)


def test_one_tensor_is_enough_and_rows_of_norms_say_nothing() -> None:
    one = run_of("gradients", "l1", [0.0] * 6, rows=("w",))
    assert_fires(one.records, "vanishing_gradient", specs=VANISHING)
    run = RunBuilder()
    for i in range(8):
        run.tensors(10 * i, "gradients", ("w",))
        frame = TensorFrame.decode(run.records.pop().value or b"")
        run.add(replace(frame, columns=("l2",), values=np.zeros((1, 1), np.float32)))
    assert_quiet(run.records, specs=VANISHING)


@pytest.mark.parametrize(("ratio", "fires"), [(1e-2, False), (1e-7, True), (float("nan"), True)])
def test_gradients_in_small_units_that_move_weights_have_not_vanished(
    ratio: float, fires: bool
) -> None:
    run = RunBuilder()
    for step in range(0, 100, 10):
        run.steps(range(step, step + 10), loss=2.0)
        run.tensors(step, "gradients", ["b", "a"], columns={"l1": 1e-8})
        run.tensors(step, "updates", ["b", "a"], columns={"update_l2": ratio, "l2": 1.0})
    assert bool(issues_of(run.records, specs=VANISHING)) == fires


def test_gradients_that_are_no_numbers_have_not_vanished() -> None:
    run = run_of("gradients", "l1", [1.0] * 3)
    for i in range(3, 12):
        bad = {row: 100 for row in ROWS}
        run.tensors(10 * i, "gradients", ROWS, nans=bad, columns={"l1": 0.0, "l2": 0.0})
    assert_quiet(run.records, specs=VANISHING)


def test_the_mean_is_that_of_the_finite_values() -> None:
    run = RunBuilder()
    nans, infs = {"a": 60, "b": 100}, {"a": 30}
    run.tensors(0, "gradients", ("a", "b", "c"), nans=nans, infs=infs, columns={"l1": 5.0})
    mean = mean_abs(TensorFrame.decode(run.records[-1].value or b""))
    assert mean is not None
    assert mean[[0, 2]].tolist() == [0.5, 0.05]
    assert np.isnan(mean[1])


# -- weight_update_ratio

RATIO = only("weight_update_ratio")


def test_updates_that_are_large_against_their_weights() -> None:
    run = run_of("updates", "update_l2", [0.01] * 5 + [0.5] * 5)
    issue = assert_fires(run.records, "weight_update_ratio", first_step=50, specs=RATIO)
    assert issue.severity == "warning"
    assert [f.value for f in issue.evidence.facts if f.name == "reason"] == ["large"]


def test_updates_that_are_next_to_nothing() -> None:
    run = run_of("updates", "update_l2", [1e-10] * 10)
    assert_fires(run.records, "weight_update_ratio", first_step=20, specs=RATIO)


@pytest.mark.parametrize(
    ("series", "rate"),
    [
        pytest.param([0.5] * 2 + [0.01] * 10, 1e-3, id="warm-up"),
        pytest.param([0.01] * 4 + [0.5] * 2 + [0.01] * 4, 1e-3, id="two summaries"),
        pytest.param([[0.01] * 10 + [0.5] * 2] * 10, 1e-3, id="few tensors"),
        pytest.param([0.0] * 10, 0.0, id="rate of zero"),
        pytest.param([1e-3] * 3, 1e-3, id="thirty steps"),
    ],
)
def test_updates_left_alone(series: list[Column], rate: float) -> None:
    assert_quiet(run_of("updates", "update_l2", series, rate=rate).records, specs=RATIO)


def pushed(gradients: Sequence[Column], *, still: int = 1) -> RunBuilder:
    """The last `still` of the weights do not move; gradients are of all, in forward order."""
    run = RunBuilder()
    moves: Column = [0.01] * (len(FORWARD) - still) + [0.0] * still
    for i, gradient in enumerate(gradients):
        run.steps([10 * i], loss=2.0, columns={"lr.0": 0.1})
        run.tensors(10 * i, "gradients", FORWARD, columns={"l2": gradient})
        run.tensors(10 * i, "updates", FORWARD, columns={"update_l2": moves})
    return run


def test_weights_without_a_gradient_worth_the_name_are_no_small_updates() -> None:
    noise: Column = [0.1] * 8 + [1e-9] * 4
    assert_quiet(pushed([noise] * 10, still=4).records, specs=RATIO)
    issue = assert_fires(
        pushed([0.1] * 10, still=4).records, "weight_update_ratio", first_step=20, specs=RATIO
    )
    assert "4 of 12 weights" in issue.reason


# -- unchanged_tensor

UNCHANGED = only("unchanged_tensor")


def weights(
    sizes: Sequence[Column], *, gradient: Column = 1.0, rate: float = 1e-3, first: int = 0
) -> RunBuilder:
    run = RunBuilder()
    for i, size in enumerate(sizes):
        step = first + 10 * i
        run.steps([step], loss=2.0, columns={"lr.0": rate})
        run.tensors(step, "gradients", FORWARD, columns={"l2": gradient})
        run.tensors(step, "weights", FORWARD, columns={"l2": size})
    return run


def moving(i: int, *, but: int | None = None) -> Column:
    return [1.0 + 1e-3 * i * (j != but) for j in range(len(FORWARD))]


def test_a_weight_that_stays_is_named() -> None:
    run = weights([moving(i, but=4) for i in range(6)])
    issue = assert_fires(run.records, "unchanged_tensor", first_step=0, specs=UNCHANGED)
    assert (issue.subject.name, issue.step) == ("l4.weight", 20)
    assert issue.evidence.followed == 0


def test_it_begins_where_it_began_and_resolves_when_it_moves() -> None:
    sizes = [moving(min(i, 5)) for i in range(10)] + [moving(i) for i in range(10, 14)]
    issues = issues_of(weights(sizes).records, specs=UNCHANGED)
    assert [(i.state, i.first_step) for i in issues] == [("firing", 50), ("resolved", 50)]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(weights([moving(i) for i in range(8)]), id="all move"),
        pytest.param(weights([1.0] * 8, gradient=0.0), id="gradients of zero"),
        pytest.param(weights([1.0] * 8, rate=0.0), id="rate of zero"),
        pytest.param(weights([1.0] * 2), id="two summaries"),
        pytest.param(weights([1.0 + 1e-6 * i for i in range(8)]), id="slowly"),
    ],
)
def test_weights_left_alone(run: RunBuilder) -> None:
    assert_quiet(run.records, specs=UNCHANGED)


def test_a_gradient_that_is_rounding_noise_moves_nothing() -> None:
    noise: Column = [0.1] * 4 + [1e-9] + [0.1] * 7
    assert_quiet(
        weights([moving(i, but=4) for i in range(8)], gradient=noise).records, specs=UNCHANGED
    )
    one = RunBuilder()
    for i in range(30):
        one.tensors(10 * i, "gradients", ("w",), columns={"l2": 0.1**i})
        one.tensors(10 * i, "weights", ("w",), columns={"l2": 1.0 + 0.1**i})
    assert_quiet(one.records, specs=UNCHANGED)


@pytest.mark.parametrize(("gradient", "fires"), [(2e-4, False), (0.1, True)])
def test_a_bias_before_a_normalisation_gets_noise_in_16_bits(gradient: float, fires: bool) -> None:
    run, rows = RunBuilder(), ("0.weight", "0.bias")
    for i in range(8):
        run.tensors(10 * i, "gradients", rows, columns={"l2": [0.1, gradient]})
        run.tensors(10 * i, "weights", rows, columns={"l2": [1.0 + 0.01 * i, 1.0]})
    assert [i.subject.name for i in issues_of(run.records, specs=UNCHANGED)][:1] == [
        "0.bias"
    ] * fires


def test_gradients_that_are_no_numbers_move_nothing() -> None:
    run = RunBuilder()
    for i in range(8):
        run.tensors(10 * i, "gradients", ("w",), nans={"w": 100}, columns={"l1": 0.0, "l2": 0.0})
        run.tensors(10 * i, "weights", ("w",))
        run.tensors(10 * i, "updates", ("w",), columns={"update_l2": 0.0})
    assert_quiet(run.records, specs=UNCHANGED)
    assert_quiet(run.records, specs=RATIO)


def test_frozen_parameters_have_no_gradients_and_do_not_count() -> None:
    run = RunBuilder()
    for i in range(8):
        run.tensors(10 * i, "gradients", FORWARD[6:])
        size = [1.0] * 6 + [1.0 + 0.01 * i] * 6
        run.tensors(10 * i, "weights", FORWARD, columns={"l2": size})
    assert_quiet(run.records, specs=UNCHANGED)


def test_an_update_that_was_measured_counts_as_a_change() -> None:
    run = RunBuilder()
    for i in range(8):
        run.tensors(10 * i, "gradients", FORWARD)
        run.tensors(10 * i, "weights", FORWARD)
        run.tensors(10 * i, "updates", FORWARD, columns={"update_l2": 1e-4})
    assert_quiet(run.records, specs=UNCHANGED)


def test_other_tensors_are_watched_where_asked() -> None:
    run = RunBuilder()
    for i in range(5):
        run.tensors(i, "recorded", ("router", "other"))
    assert_quiet(run.records, specs=UNCHANGED)
    specs = only("unchanged_tensor", tensors=("recorded/rout*",))
    assert_fires(run.records, "unchanged_tensor", first_step=0, specs=specs)


def grouped(
    *, still: int, rates: Sequence[tuple[float, float]], tensors: tuple[int, int] = (8, 4)
) -> RunBuilder:
    """Two parameter groups; the last `still` of twelve weights do not move."""
    run = RunBuilder()
    groups = tuple(Group(index=i, parameters=n) for i, n in enumerate(tensors))
    run.event(RunStarted(run_id=run.run_id, incarnation="made-1", job_id="job", groups=groups))
    stays = [0.0] * still
    for i, (first, second) in enumerate(rates):
        lr = {"lr.0": first, "lr.1": second}
        run.steps(range(10 * i, 10 * i + 10), loss=2.0, columns=lr)
        run.tensors(10 * i + 9, "gradients", FORWARD)
        sizes = [1.0 + 1e-3 * i] * (len(FORWARD) - still) + [1.0] * still
        run.tensors(10 * i + 9, "weights", FORWARD, columns={"l2": sizes})
        moves = [1e-3] * (len(FORWARD) - still) + stays
        run.tensors(10 * i + 9, "updates", FORWARD, columns={"update_l2": moves})
    return run


def test_a_group_at_a_rate_of_zero_hides_no_weight_of_another() -> None:
    rates = [(0.1, 0.0)] * 10
    assert_quiet(grouped(still=4, rates=rates).records, specs=UNCHANGED)
    issue = assert_fires(grouped(still=5, rates=rates).records, "unchanged_tensor", specs=UNCHANGED)
    assert issue.evidence.followed == 4
    assert [f.value for f in issue.evidence.facts if f.name == "at_rest"] == [4.0]


def test_updates_of_a_group_at_a_rate_of_zero_are_left_out() -> None:
    rates = [(0.1, 0.0)] * 10
    for still in (4, 5):
        assert_quiet(grouped(still=still, rates=rates).records, specs=RATIO)
    assert_fires(grouped(still=6, rates=rates).records, "weight_update_ratio", specs=RATIO)


def test_a_cyclic_rate_that_touches_zero_is_one_issue_at_most() -> None:
    rates = [((i // 5 % 2) * 0.1,) * 2 for i in range(100)]
    for rule, specs in (("unchanged_tensor", UNCHANGED), ("weight_update_ratio", RATIO)):
        assert_quiet(grouped(still=0, rates=rates).records, specs=specs)
        run = grouped(still=12, rates=rates)
        assert_fires(run.records, rule, specs=specs)
        assert "resolved" not in [i.state for i in issues_of(run.records, specs=specs)]


def test_the_end_of_a_schedule_moves_nothing_and_is_no_issue() -> None:
    falling = [(10.0**-i, 10.0**-i) for i in range(12)]
    run = grouped(still=0, rates=falling[:5])
    for i, (rate, _) in enumerate(falling[5:], 5):
        run.steps(range(10 * i, 10 * i + 10), loss=2.0, columns={"lr.0": rate, "lr.1": rate})
        run.tensors(10 * i + 9, "gradients", FORWARD)
        run.tensors(10 * i + 9, "weights", FORWARD)
        run.tensors(10 * i + 9, "updates", FORWARD, columns={"update_l2": 0.0})
    assert_quiet(run.records, specs=UNCHANGED)
    assert_quiet(run.records, specs=RATIO)


def test_gradients_and_updates_are_watched_where_asked() -> None:
    for name in ("gradients", "updates"):
        run = RunBuilder()
        for i in range(5):
            run.tensors(10 * i, name, FORWARD, columns={"update_l2": 1.0})
        assert_quiet(run.records, specs=UNCHANGED)
        specs = only("unchanged_tensor", tensors=(f"{name}/*",))
        issue = assert_fires(run.records, "unchanged_tensor", first_step=0, specs=specs)
        assert issue.evidence.followed == 11


def test_arrays_that_are_recorded_one_by_one_are_told_apart() -> None:
    run = RunBuilder()
    for i in range(20):
        run.tensors(i, "tensors", ["moves"], columns={"l2": float(i)})
        run.tensors(i, "tensors", ["stays"])
        run.tensors(i, "tensors", ["late"], columns={"l2": float(min(i, 8))})
    specs = only("unchanged_tensor", tensors=("tensors/*",))
    issues = issues_of(run.records, specs=specs)
    assert [(i.subject.name, i.state, i.first_step) for i in issues] == [
        ("stays", "firing", 0),
        ("late", "firing", 8),
    ]


def test_the_evidence_has_the_values_that_were_seen() -> None:
    run = RunBuilder()
    for i in range(6):
        run.tensors(i, "tensors", ("a", "b")[: 1 + (i > 0)], columns={"l2": 1.0 + 0.01 * i})
    specs = only("unchanged_tensor", tensors=("tensors/*",), rtol=0.1, num_steps=4)
    series = assert_fires(run.records, "unchanged_tensor", specs=specs).evidence.series
    assert series is not None
    assert series.steps == (1, 2, 3, 4)
    assert series.values == pytest.approx((1.01, 1.02, 1.03, 1.04))


def test_a_new_incarnation_starts_anew_with_other_tensors() -> None:
    run = weights([1.0] * 2)
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started()
    for i in range(2):
        run.tensors(10 * i, "gradients", ("new", *FORWARD))
        run.tensors(10 * i, "weights", ("new", *FORWARD))
    assert_quiet(run.records, specs=UNCHANGED)


# -- dead_relu

DEAD = only("dead_relu")


def test_a_layer_that_stays_dead_is_named_once() -> None:
    high: Column = [0.1] * 6 + [0.9] * 6
    run = run_of("activations", "dead", [0.1, *[high] * 5], rows=FORWARD, every=100)
    issue = assert_fires(run.records, "dead_relu", first_step=100, specs=DEAD)
    assert (issue.subject.name, issue.step) == ("l6.weight", 300)
    assert issue.evidence.followed == 5


def test_frames_of_other_columns_do_not_hide_those_of_relus() -> None:
    run = RunBuilder()
    run.started()
    for i in range(5):
        run.steps([10 * i], loss=2.0)
        run.tensors(10 * i, "activations", ("gelu",))
        run.tensors(10 * i, "activations", ROWS, columns={"dead": 0.9})
        run.tensors(10 * i, "activations", ("tanh",), columns={"saturated": 0.1})
    assert_fires(run.records, "dead_relu", first_step=0, specs=DEAD)


def test_it_resolves_when_no_layer_is_dead() -> None:
    run = run_of("activations", "dead", [0.9] * 4 + [0.2] * 2, rows=FORWARD)
    assert [i.state for i in issues_of(run.records, specs=DEAD)] == ["firing", "resolved"]


@pytest.mark.parametrize(
    "series", [[0.9, 0.9], [0.9, 0.2] * 5, [0.5] * 5, [[0.9] + [0.1] * 11, 0.1, 0.9, 0.9]]
)
def test_activations_left_alone(series: list[Column]) -> None:
    run = run_of("activations", "dead", series, rows=FORWARD)
    assert_quiet(run.records, specs=DEAD)


def test_an_output_that_is_no_number_is_neither_dead_nor_alive() -> None:
    nan, half = float("nan"), [float("nan")] * 6 + [0.1] * 6
    run = run_of("activations", "dead", [nan] * 10, rows=FORWARD)
    assert_quiet(run.records, specs=DEAD)
    run = run_of("activations", "dead", [0.9, 0.9, nan, half, nan, 0.9, nan, half], rows=FORWARD)
    issue = assert_fires(run.records, "dead_relu", first_step=0, specs=DEAD)
    assert (issue.step, issue.evidence.series and len(issue.evidence.series.steps)) == (50, 4)
    assert [i.state for i in issues_of(run.records, specs=DEAD)] == ["firing"]


# -- whole summaries


def test_split_summaries_are_put_together_and_torn_ones_left_out() -> None:
    run = run_of("gradients", "l1", [1.0])
    frame = TensorFrame.decode(run.records[-1].value or b"")
    parts = frame.split(700)
    assert len(parts) > 2
    whole = LowestRankRows()
    found = [whole.assemble(part) for part in parts]
    assert found[:-1] == [None] * (len(parts) - 1)
    assert found[-1] is not None
    assert found[-1].rows == frame.rows
    torn = [whole.assemble(replace(part, step=5)) for part in parts[1:]]
    assert torn == [None] * len(torn)
    assert whole.assemble(replace(frame, step=6)) is not None
    assert whole.assemble(replace(frame, step=6)) is None


def test_a_lower_rank_takes_the_lead() -> None:
    run = run_of("gradients", "l1", [1.0])
    frame = TensorFrame.decode(run.records[-1].value or b"")
    second = replace(frame, origin=replace(frame.origin, rank=1))
    whole = LowestRankRows()
    assert whole.assemble(second) is not None
    assert whole.assemble(frame) is not None
    assert whole.assemble(replace(second, step=9)) is None


def test_rows_are_found_by_name() -> None:
    values = np.array([1.0, 2.0])
    assert aligned(("b", "c"), ("a", "b"), values)[0] == 2.0
    assert np.isnan(aligned(("b", "c"), ("a", "b"), values)[1])
    assert np.isnan(aligned(("b",), (), np.zeros(0))).all()
