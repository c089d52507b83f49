"""`nonfinite`: what fires it, what does not, and where it says that it began."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

NAN, INF = math.nan, math.inf
ROWS = ("head.weight", "blocks.1.weight", "blocks.0.weight")


def healthy(run: RunBuilder, steps: range, rank: int = 0) -> None:
    run.steps(
        steps,
        rank=rank,
        loss=2.0,
        gradient_norm=1.0,
        gradient_nonfinite=0,
        columns={"lr.0": 0.1},
    )


def bad_gradients(
    run: RunBuilder,
    step: int,
    nans: Mapping[str, int],
    *,
    loss: float = 2.0,
    rank: int = 0,
    local: Sequence[str] = (),
) -> None:
    run.steps(
        [step],
        rank=rank,
        loss=loss,
        gradient_norm=NAN,
        gradient_nonfinite=len(nans),
        columns={"lr.0": 0.1},
    )
    run.tensors(step, "gradients", ROWS, rank=rank, nans=nans)
    if local:
        run.tensors(step, "local_gradients", local, rank=rank, nans=dict.fromkeys(local, 1))


def started(world_size: int = 1) -> RunBuilder:
    run = RunBuilder(world_size=world_size, step_ms=10)
    for rank in range(world_size):
        run.started(rank=rank)
    return run


def found(run: RunBuilder, first_step: int) -> IssueFiring:
    return assert_fires(run.records, "nonfinite", first_step=first_step)


def test_one_bad_gradient_is_named() -> None:
    run = started()
    healthy(run, range(30))
    bad_gradients(run, 30, {"blocks.1.weight": 3})
    issue = found(run, 30)
    assert (issue.subject.kind, issue.subject.name) == ("tensor", "blocks.1.weight")
    assert issue.subject.collection == "gradients"
    assert (issue.severity, issue.stop_worthy, issue.first_rank) == ("critical", True, 0)
    assert {fact.name: fact.value for fact in issue.evidence.facts}["nans"] == 3
    assert issue.evidence.series is not None
    assert len(issue.evidence.series.steps) == 31


def test_of_some_bad_gradients_the_first_in_backward_order_is_named() -> None:
    run = started()
    healthy(run, range(5))
    bad_gradients(run, 5, {"blocks.0.weight": 1, "blocks.1.weight": 1})
    issue = found(run, 5)
    assert issue.subject.name == "blocks.1.weight"
    assert issue.evidence.also == ("blocks.0.weight",)
    assert issue.evidence.followed == 1


def test_all_gradients_at_once_point_at_the_loss() -> None:
    run = started()
    bad_gradients(run, 0, dict.fromkeys(ROWS, 1))
    issue = found(run, 0)
    assert issue.subject.kind == "loss"
    assert issue.evidence.followed == 3


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_loss_is_named_before_its_gradients(value: float) -> None:
    run = started()
    healthy(run, range(5))
    bad_gradients(run, 5, {"blocks.0.weight": 1}, loss=value)
    issue = found(run, 5)
    assert issue.subject.kind == "loss"
    loss = next(fact.value for fact in issue.evidence.facts if fact.name == "loss")
    assert loss == value or (isinstance(loss, float) and math.isnan(loss))


def test_tensors_may_come_before_the_scalars() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(5, "gradients", ROWS, nans={"blocks.1.weight": 1})
    assert issues_of(run.records) == []
    run.steps([5], loss=2.0, gradient_norm=NAN, gradient_nonfinite=1, columns={"lr.0": 0.1})
    assert found(run, 5).subject.name == "blocks.1.weight"


def test_parts_of_a_step_are_waited_for() -> None:
    run = started()
    healthy(run, range(5))
    run.steps([5], loss=2.0, gradient_norm=NAN, gradient_nonfinite=1, columns={"lr.0": 0.1})
    assert issues_of(run.records) == []
    run.tensors(5, "gradients", ROWS, nans={"blocks.0.weight": 1})
    assert found(run, 5).subject.name == "blocks.0.weight"


def test_when_the_summaries_do_not_come_the_next_step_decides() -> None:
    run = started()
    healthy(run, range(5))
    run.steps([5], loss=2.0, gradient_norm=NAN, gradient_nonfinite=2, columns={"lr.0": 0.1})
    healthy(run, range(6, 7))
    issue = found(run, 5)
    assert issue.subject.kind == "scalar"
    assert issue.step == 6


def test_when_nothing_comes_a_timer_decides() -> None:
    run = started()
    run.steps([0], loss=2.0, gradient_norm=NAN, gradient_nonfinite=2)
    assert issues_of(run.records, until_ms=run.now_ms + 199) == []
    issue = assert_fires(run.records, "nonfinite", until_ms=run.now_ms + 1_000)
    assert issue.at_ms == run.now_ms + 1_000


def test_the_end_of_the_run_decides() -> None:
    run = started()
    run.steps([0], loss=2.0, gradient_norm=NAN, gradient_nonfinite=2)
    run.ended()
    found(run, 0)


def test_a_frame_of_many_steps_is_looked_at_step_by_step() -> None:
    run = started()
    losses = [2.0, 2.0, NAN, NAN, NAN]
    run.steps(range(5), loss=losses, per_frame=5, gradient_nonfinite=0)
    found(run, 2)


@pytest.mark.parametrize("count", [NAN, -1e30])
def test_a_count_of_gradients_that_is_none_is_no_issue(count: float) -> None:
    run = started()
    healthy(run, range(10))
    run.steps([10], loss=2.0, gradient_norm=1.0, gradient_nonfinite=count)
    run.ended()
    assert_quiet(run.records)


def test_where_gradients_were_not_counted_their_norm_decides() -> None:
    run = started()
    run.steps([5], loss=2.0, gradient_norm=NAN, gradient_nonfinite=NAN)
    run.ended()
    found(run, 5)


def test_a_count_beyond_all_bounds_is_an_issue() -> None:
    run = started()
    run.steps([5], loss=2.0, gradient_norm=1.0, gradient_nonfinite=INF)
    run.ended()
    found(run, 5)


def test_a_bad_weight_alone_is_named() -> None:
    run = started()
    healthy(run, range(10))
    run.tensors(9, "weights", ["a", "b"], infs={"b": 2})
    issue = found(run, 9)
    assert (issue.subject.name, issue.subject.collection) == ("b", "weights")


def test_a_bad_gradient_comes_before_the_weight_that_it_made() -> None:
    run = started()
    healthy(run, range(9))
    bad_gradients(run, 9, {"blocks.1.weight": 1})
    run.tensors(9, "weights", ROWS, nans={"blocks.1.weight": 1})
    run.steps(range(10, 20), loss=NAN, gradient_norm=NAN, gradient_nonfinite=3)
    assert found(run, 9).subject.collection == "gradients"


def test_only_the_rank_whose_own_gradients_were_bad_is_named() -> None:
    run = started(world_size=3)
    for step in range(5):
        for rank in range(3):
            healthy(run, range(step, step + 1), rank)
    # All have the reduced NaN; rank 2 alone had it before the reduce, and is the last to say so.
    for rank in range(3):
        local = ("blocks.1.weight",) if rank == 2 else ()
        bad_gradients(run, 5, {"blocks.1.weight": 1, "blocks.0.weight": 1}, rank=rank, local=local)
    issue = found(run, 5)
    assert issue.first_rank == 2
    assert issue.subject.name == "blocks.1.weight"
    facts = {fact.name: fact.value for fact in issue.evidence.facts}
    assert facts["bad_ranks"] == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_rank_with_the_bad_loss_is_named_in_any_order(order: tuple[int, int]) -> None:
    run = started(world_size=2)
    for rank in order:
        healthy(run, range(5), rank)
    for rank in order:
        loss = NAN if rank == 1 else 2.0
        bad_gradients(run, 5, dict.fromkeys(ROWS, 1), loss=loss, rank=rank)
    issue = found(run, 5)
    assert (issue.first_rank, issue.subject.kind) == (1, "loss")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_came_by_an_average_within_the_step_is_told_from_what_began_it(
    order: tuple[int, int],
) -> None:
    run = started(world_size=2)
    for rank in order:
        healthy(run, range(5), rank)
    # Averaged after each of two backward calls: from the second on rank 0 has what rank 1 brought.
    for rank in order:
        bad_gradients(run, 5, {"blocks.1.weight": 1}, rank=rank)
    for rank in order:
        run.tensors(
            5,
            "local_gradients",
            ["blocks.1.weight"],
            rank=rank,
            nans={"blocks.1.weight": 1},
            columns={"backward": float(rank == 0)},
        )
    assert found(run, 5).first_rank == 1


def test_of_several_backward_calls_of_a_rank_the_first_counts() -> None:
    run = started(world_size=2)
    names = ["blocks.0.weight", "blocks.1.weight"]
    for rank in (0, 1):
        healthy(run, range(5), rank)
    for rank in (0, 1):
        bad_gradients(run, 5, dict.fromkeys(names, 1), rank=rank)
    for rank, calls in ((0, [2.0, 2.0]), (1, [3.0, 1.0])):
        run.tensors(
            5,
            "local_gradients",
            names,
            rank=rank,
            nans=dict.fromkeys(names, 1),
            columns={"backward": calls},
        )
    assert found(run, 5).first_rank == 1


def test_an_earlier_step_of_a_slow_rank_wins() -> None:
    run = started(world_size=2)
    bad_gradients(run, 6, {"blocks.1.weight": 1}, rank=0, local=("blocks.1.weight",))
    healthy(run, range(5), 1)
    bad_gradients(run, 5, {"blocks.0.weight": 1}, rank=1, local=("blocks.0.weight",))
    healthy(run, range(6, 8), 1)
    issue = found(run, 5)
    assert (issue.first_rank, issue.subject.name) == (1, "blocks.0.weight")


def test_a_silent_rank_is_waited_for_one_second_at_most() -> None:
    run = started(world_size=2)
    bad_gradients(run, 0, {"blocks.1.weight": 1}, loss=NAN)
    assert issues_of(run.records, until_ms=run.now_ms + 999) == []
    assert_fires(run.records, "nonfinite", until_ms=run.now_ms + 1000)


def test_a_rank_that_speaks_late_is_waited_for_where_no_other_began_it() -> None:
    run = started(world_size=2)
    for rank in (0, 1):
        healthy(run, range(5), rank)
    bad_gradients(run, 5, {"blocks.1.weight": 1})
    run.wait(3.0)
    bad_gradients(run, 5, {"blocks.1.weight": 1}, rank=1, local=("blocks.1.weight",))
    issue = found(run, 5)
    assert issue.first_rank == 1


def test_a_rank_whose_first_word_comes_after_the_others_last_is_waited_for_too() -> None:
    run = started(world_size=2)
    healthy(run, range(5))
    bad_gradients(run, 5, {"blocks.1.weight": 1})
    healthy(run, range(6, 8))
    run.ended()
    healthy(run, range(5), 1)
    bad_gradients(run, 5, {"blocks.1.weight": 1}, rank=1, local=("blocks.1.weight",))
    run.ended(rank=1)
    assert found(run, 5).first_rank == 1


def test_but_for_five_seconds_at_most() -> None:
    run = started(world_size=2)
    for rank in (0, 1):
        healthy(run, range(5), rank)
    bad_gradients(run, 5, {"blocks.1.weight": 1})
    assert issues_of(run.records, until_ms=run.now_ms + 4_999) == []
    assert assert_fires(run.records, "nonfinite", until_ms=run.now_ms + 5_000).first_rank == 0


def test_a_step_that_a_loss_scaler_skipped_is_no_issue() -> None:
    run = started()
    healthy(run, range(5))
    # Without a learning rate: the optimizer has not stepped.
    run.steps([5], loss=2.0, gradient_norm=INF, gradient_nonfinite=3)
    run.tensors(5, "gradients", ROWS, infs=dict.fromkeys(ROWS, 1))
    run.steps([5], loss=2.0, gradient_norm=INF, gradient_nonfinite=3)
    healthy(run, range(5, 40))
    assert_quiet(run.records, specs=only("nonfinite"))


def test_but_a_bad_loss_is_one_though_the_step_was_skipped() -> None:
    run = started()
    healthy(run, range(5))
    run.steps([5], loss=NAN)
    found(run, 5)


def test_infinities_in_activations_are_normal() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(4, "activations", ["mask"], infs={"mask": 50})
    assert_quiet(run.records)


def test_unless_they_were_asked_for() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(4, "activations", ["mask", "out"], infs={"mask": 50, "out": 1})
    specs = only("nonfinite", tensors=("activations/out*",))
    issue = assert_fires(run.records, "nonfinite", specs=specs)
    assert issue.subject.name == "out"


@pytest.mark.parametrize("pattern", ["mine/blocks.?.weight", "mine/*.weight@tp1", "mine/*@*"])
def test_a_pattern_names_a_part_of_a_tensor_with_its_place_and_without(pattern: str) -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(4, "mine", ["blocks.0.weight@tp1"], infs={"blocks.0.weight@tp1": 1})
    issue = assert_fires(run.records, "nonfinite", specs=only("nonfinite", tensors=(pattern,)))
    assert issue.subject.name == "blocks.0.weight@tp1"


def test_only_nan_lets_infinities_pass() -> None:
    run = started()
    run.steps([0], loss=INF, gradient_norm=INF, gradient_nonfinite=2)
    run.tensors(0, "gradients", ROWS, infs={"head.weight": 1})
    run.steps(range(1, 5), loss=2.0, gradient_norm=1.0, gradient_nonfinite=0)
    specs = only("nonfinite", only_nan=True)
    assert_quiet(run.records, specs=specs, until_ms=run.now_ms + 5000)
    run.steps([5], loss=NAN, gradient_norm=1.0, gradient_nonfinite=0)
    assert_fires(run.records, "nonfinite", specs=specs, first_step=5)


def test_for_steps_asks_for_a_row_of_bad_steps() -> None:
    specs = only("nonfinite", for_steps=3)
    run = started()
    healthy(run, range(5))
    for step in (5, 6):
        bad_gradients(run, step, {"head.weight": 1})
    healthy(run, range(7, 9))
    assert_quiet(run.records, specs=specs, until_ms=run.now_ms + 5000)
    for step in (9, 10, 11):
        bad_gradients(run, step, {"head.weight": 1})
    assert_fires(run.records, "nonfinite", specs=specs, first_step=9)


@pytest.mark.parametrize(("mode", "column"), [("eval", "loss"), ("train", "log.reward")])
def test_evaluation_losses_and_named_scalars_only_warn(mode: str, column: str) -> None:
    run = started()
    healthy(run, range(5))
    run.steps([4], mode=mode, columns={column: NAN})  # type: ignore[arg-type]
    issue = assert_fires(run.records, "nonfinite")
    assert (issue.severity, issue.stop_worthy) == ("warning", False)


def test_it_resolves_and_one_soon_after_is_the_same_issue_again() -> None:
    run = started()
    healthy(run, range(5))
    bad_gradients(run, 5, {"head.weight": 1})
    healthy(run, range(6, 60))
    bad_gradients(run, 60, {"head.weight": 1})
    issues = issues_of(run.records, "nonfinite")
    assert [(i.state, i.first_step) for i in issues] == [
        ("firing", 5),
        ("resolved", 5),
        ("firing", 60),
    ]
    assert [i.times for i in issues] == [1, 1, 2]
    assert len({i.issue_id for i in issues}) == 1
    assert not issues[2].muted


def test_a_long_frame_of_a_healthy_rank_does_not_end_the_issue_of_another() -> None:
    run = started(world_size=2)
    for rank in (0, 1):
        healthy(run, range(5), rank)
    for begin in range(5, 305, 50):
        steps = range(begin, begin + 50)
        run.steps(steps, rank=1, loss=NAN, gradient_norm=NAN, gradient_nonfinite=3)
        run.wait(5.0)
        run.steps(steps, rank=0, loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    assert [(i.state, i.first_rank) for i in issues_of(run.records, "nonfinite")] == [("firing", 1)]
    healthy(run, range(305, 360), 1)
    assert [i.state for i in issues_of(run.records, "nonfinite")] == ["firing", "resolved"]


def test_after_the_end_of_the_rank_where_it_began_any_other_ends_the_issue() -> None:
    run = started(world_size=2)
    for rank in (0, 1):
        healthy(run, range(5), rank)
    run.steps([5], rank=1, loss=NAN, gradient_norm=NAN, gradient_nonfinite=3)
    run.steps([5], rank=0, loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    run.wait(5.0)
    run.ended(rank=1)
    healthy(run, range(6, 60))
    assert [i.state for i in issues_of(run.records, "nonfinite")] == ["firing", "resolved"]


def test_nan_for_ever_is_one_issue() -> None:
    run = started()
    healthy(run, range(5))
    run.steps(range(5, 300), loss=NAN, gradient_norm=NAN, gradient_nonfinite=3)
    assert [issue.state for issue in issues_of(run.records, "nonfinite")] == ["firing"]


def test_the_checkpoint_from_before_the_onset_is_named() -> None:
    run = started()
    healthy(run, range(10))
    run.checkpoint(4)
    run.checkpoint(8)
    run.checkpoint(9, finite=False)
    bad_gradients(run, 10, {"head.weight": 1})
    run.checkpoint(10)
    checkpoint = found(run, 10).last_good_checkpoint
    assert checkpoint is not None
    assert checkpoint.step == 8


def bad_loss(run: RunBuilder, step: int, *, rank: int = 0) -> None:
    bad_gradients(run, step, dict.fromkeys(ROWS, 1), loss=NAN, rank=rank)


def test_a_bad_input_of_the_step_comes_before_all_that_follows() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(5, "inputs", ["0", "1"], nans={"0": 1})
    run.tensors(5, "activations", ["act1", "act2"], nans={"act1": 9, "act2": 9})
    bad_loss(run, 5)
    issue = found(run, 5)
    assert (issue.branch, issue.subject.name, issue.subject.collection) == ("input", "0", "inputs")
    assert (issue.severity, issue.stop_worthy) == ("critical", True)
    assert issue.evidence.followed == 3


def test_an_input_that_was_bad_before_and_did_no_harm_is_not_the_cause() -> None:
    run = started()
    run.tensors(4, "inputs", ["0"], nans={"0": 1})
    healthy(run, range(5))
    bad_loss(run, 5)
    assert found(run, 5).branch == "loss"


def test_an_input_of_infinities_may_be_a_mask() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(5, "inputs", ["mask"], infs={"mask": 50})
    bad_loss(run, 5)
    assert found(run, 5).branch == "loss"


def test_of_activations_the_first_in_forward_order_is_named() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(5, "activations", ["act1", "act2", "act3"], nans={"act3": 9}, infs={"act2": 1})
    bad_loss(run, 5)
    issue = found(run, 5)
    assert (issue.branch, issue.subject.kind, issue.subject.name) == ("activation", "layer", "act2")
    assert issue.reason.startswith("the output of act2 has infinite values, and the loss is NaN")


def test_the_last_summary_before_says_it_too() -> None:
    run = started()
    run.tensors(3, "activations", ["act1", "act2"], nans={"act2": 9}, infs={"act1": 1})
    healthy(run, range(5))
    bad_loss(run, 5)
    issue = found(run, 5)
    assert (issue.branch, issue.subject.name) == ("activation", "act2")
    assert "(seen at step 3)" in issue.reason
    assert "that was bad when it was last captured, at step 3." in issue.evidence.explanation


def test_what_is_infinite_by_nature_is_no_origin() -> None:
    run = started()
    for step in (1, 3):
        run.tensors(step, "activations", ["mask"], nans={"mask": 1}, infs={"mask": 9})
    healthy(run, range(5))
    run.tensors(5, "activations", ["mask"], infs={"mask": 9})
    bad_loss(run, 5)
    assert found(run, 5).branch == "loss"


def test_a_finite_loss_leaves_it_to_the_gradients() -> None:
    run = started()
    healthy(run, range(5))
    run.tensors(5, "activations", ["act1"], nans={"act1": 9})
    bad_gradients(run, 5, {"blocks.1.weight": 1})
    assert found(run, 5).branch == "gradient"


def test_only_the_rank_in_which_it_began_is_asked() -> None:
    run = started(world_size=2)
    for rank in (0, 1):
        healthy(run, range(5), rank)
    run.tensors(5, "activations", ["act0"], rank=0, nans={"act0": 9})
    run.tensors(5, "activations", ["act1"], rank=1, nans={"act1": 9})
    bad_gradients(run, 5, dict.fromkeys(ROWS, 1), rank=0)
    bad_loss(run, 5, rank=1)
    issue = found(run, 5)
    assert (issue.first_rank, issue.subject.name) == (1, "act1")


def test_clipping_makes_all_gradients_of_one_that_is_bad() -> None:
    run = started()
    healthy(run, range(5))
    columns = {"lr.0": 0.1, "gradient_norm_clipped": NAN}
    run.steps([5], loss=2.0, gradient_norm=NAN, gradient_nonfinite=3, columns=columns)
    run.tensors(5, "gradients", ROWS, nans=dict.fromkeys(ROWS, 1))
    issue = found(run, 5)
    assert (issue.branch, issue.subject.kind) == ("gradient", "scalar")
    assert "clipped" in issue.evidence.explanation


def bad_weight(run: RunBuilder, step: int, **more: int) -> None:
    """The search after a bad loss has found that this weight has a NaN; `more` counts of it."""
    counts = {"numel": 100, "nans": 1, "infs": 0, "order": 3, **more}
    run.add(
        TensorFrame(
            origin=run.origin(),
            step=step,
            collection="weights",
            rows=("body.weight",),
            columns=(),
            values=np.zeros((1, 0), np.float32),
            count_columns=tuple(counts),
            counts=np.array([[*counts.values()]], np.uint64),
        )
    )


def test_a_weight_that_the_forward_pass_met_comes_before_what_it_made() -> None:
    run = started()
    healthy(run, range(5))
    bad_weight(run, 5)
    bad_loss(run, 5)
    run.tensors(5, "weights", ROWS, nans=dict.fromkeys(ROWS, 1))
    issue = found(run, 5)
    assert (issue.branch, issue.subject.name) == ("weight", "body.weight")
    assert issue.evidence.followed == 3


@pytest.mark.parametrize(
    ("state", "first_step", "words"),
    [
        pytest.param(7, 4, "most probably the gradient of step 4 was not finite", id="its average"),
        pytest.param(0, 5, "the update of step 4 or the program changed it", id="not known"),
    ],
)
def test_the_update_before_a_bad_weight_is_named(state: int, first_step: int, words: str) -> None:
    run = started()
    healthy(run, range(5))
    bad_weight(run, 5, state_nonfinite=state)
    bad_loss(run, 5)
    run.tensors(5, "weights", ROWS, nans=dict.fromkeys(ROWS, 1))
    issue = found(run, first_step)
    assert (issue.branch, issue.first_step) == ("weight", first_step)
    assert ("the update of step 4 wrote it" in issue.reason) == bool(state)
    assert words in issue.evidence.explanation
    assert "check the batch of that step, not the one after it" in issue.remedy


@pytest.mark.parametrize("origin", [0, 1])
def test_what_the_user_logs_between_the_tables_of_a_bad_step_hides_no_rank(origin: int) -> None:
    run = started(world_size=2)
    for step in range(10):
        for rank in (0, 1):
            healthy(run, range(step, step + 1), rank)
            run.steps([step], rank=rank, columns={"log.accuracy": 0.5})
    for rank in (origin, 1 - origin):
        local = ["blocks.1.weight"] if rank == origin else []
        bad_gradients(run, 10, {"blocks.1.weight": 5}, rank=rank, local=local)
        run.steps([10], rank=rank, columns={"log.accuracy": 0.5})
    for rank in (0, 1):
        bad_gradients(run, 11, {"blocks.1.weight": 5}, rank=rank)
    issue = found(run, 10)
    assert (issue.first_rank, issue.subject.name) == (origin, "blocks.1.weight")


def test_what_the_user_logs_at_other_steps_is_no_recovery() -> None:
    run = started()
    for step in range(0, 400, 50):
        loss = NAN if step >= 100 else 1.0
        run.steps(range(step, step + 50), per_frame=50, loss=loss, columns={"lr.0": 0.1})
        logged = range(20_000 + step, 20_050 + step)
        run.steps(logged, per_frame=50, columns={"log.accuracy": 0.5})
    assert [i.state for i in issues_of(run.records, specs=only("nonfinite"))] == ["firing"]


def test_a_logged_scalar_with_a_long_name_does_not_end_the_rule() -> None:
    run = started()
    healthy(run, range(5))
    run.steps([4], columns={"log." + 200 * "m": NAN})
    run.steps([5, 6], loss=NAN, columns={"lr.0": 0.1})
    run.wait(10)
    run.heartbeat()
    issues = issues_of(run.records, specs=only("nonfinite"))
    assert [i.branch for i in issues] == ["scalar", "loss"]
