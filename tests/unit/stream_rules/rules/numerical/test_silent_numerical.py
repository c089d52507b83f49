"""Rules on silent faults of gradients and optimizers, on made series: each branch, its edges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from support.records.counted import add
from support.rules.restarted import half_way
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

CLIPPING = only("excessive_clipping")
CLEARED = only("gradients_not_cleared")
FLOW = only("no_gradient")
STATE = only("dead_optimizer_state")
UNCHANGED = only("unchanged_tensor")
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def said(run: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[tuple[str, str, str]]:
    return [(i.branch, i.severity, i.state) for i in issues_of(run.records, specs=specs)]


# -- excessive_clipping ---------------------------------------------------------------------


def clipped(before: Sequence[float], after: Sequence[float]) -> RunBuilder:
    run = RunBuilder()
    run.steps(range(len(before)), loss=1.0, gradient_norm=before, gradient_norm_clipped=after)
    return run


def test_clipping_to_next_to_nothing_is_told_after_five_steps() -> None:
    issue = assert_fires(
        clipped([2.0] * 30, [1e-4] * 30).records, "excessive_clipping", first_step=0, specs=CLIPPING
    )
    assert (issue.branch, issue.severity, issue.step) == ("nothing_left", "warning", 4)


def test_gradients_ten_thousand_times_the_limit_are_an_info() -> None:
    run = clipped([5e4] * 60, [1.0] * 60)
    assert said(run, CLIPPING) == [("far_too_large", "info", "firing")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([50.0] * 200, [1.0] * 200, id="a usual limit"),
        pytest.param([2.0] * 200, [0.1] * 200, id="a tight limit"),
        pytest.param([1e-3] * 200, [1e-3] * 200, id="small gradients that are left alone"),
        pytest.param([2.0, 2.0, 2.0, 2.0, 0.01] * 40, [0.01] * 200, id="now and then"),
        pytest.param([math.nan] * 200, [math.nan] * 200, id="no numbers"),
        pytest.param([0.0] * 200, [0.0] * 200, id="no gradients"),
        pytest.param([300.0] * 4 + [1.0] * 20, [1e-3] * 4 + [1e-3] * 20, id="a start"),
    ],
)
def test_usual_clipping_is_left_alone(before: list[float], after: list[float]) -> None:
    if after[-1] == 1e-3 and before[-1] == 1.0:
        after = [1e-3] * 4 + [1.0] * 20
    assert_quiet(clipped(before, after).records, specs=CLIPPING)


def test_clipping_that_lets_gradients_through_again_is_over() -> None:
    run = clipped([2.0] * 60, [1e-4] * 20 + [1.0] * 40)
    assert [state for *_, state in said(run, CLIPPING)] == ["firing", "resolved"]


def test_norms_without_clipping_and_double_points_say_nothing() -> None:
    run = RunBuilder()
    run.steps(range(50), loss=1.0, gradient_norm=3.0)
    assert issues_of(run.records, specs=CLIPPING) == []
    double = clipped([2.0] * 4, [1e-4] * 4)
    for record in tuple(double.records):
        double.again(record)
    assert issues_of(double.records, specs=CLIPPING) == []


# -- gradients_not_cleared ------------------------------------------------------------------


def uncleared(*points: tuple[int, float]) -> RunBuilder:
    run = RunBuilder()
    for step, streak in points:
        run.steps([step], loss=1.0, columns={"gradients_uncleared": streak})
    return run


def test_gradients_that_are_not_cleared_are_told_at_the_second_step() -> None:
    run = uncleared((2, 2.0), (4, 4.0), (8, 8.0))
    issue = assert_fires(run.records, "gradients_not_cleared", first_step=1, specs=CLEARED)
    assert (issue.step, issue.severity, issue.stop_worthy) == (2, "warning", False)


def test_cleared_gradients_are_left_alone_and_end_an_issue() -> None:
    assert_quiet(uncleared((1, 0.0)).records, specs=CLEARED)
    assert_quiet(uncleared((1, 1.0), (2, math.nan)).records, specs=CLEARED)
    run = uncleared((51, 2.0), (53, 4.0), (54, 0.0))
    assert [state for *_, state in said(run, CLEARED)] == ["firing", "resolved"]


def test_only_the_lowest_rank_is_asked() -> None:
    run = RunBuilder(world_size=2)
    run.steps([2], rank=1, columns={"gradients_uncleared": 2.0})
    run.steps([2], rank=0, columns={"gradients_uncleared": 2.0})
    run.steps([4], rank=1, columns={"gradients_uncleared": 4.0})
    assert_fires(run.records, "gradients_not_cleared", specs=CLEARED)


# -- no_gradient ----------------------------------------------------------------------------


def without(
    run: RunBuilder,
    step: int,
    names: Sequence[str],
    *,
    steps: int = 5,
    called: int = 3,
    silent: int = 0,
    watched: int = 3,
    longest: int = 0,
    had: int = 0,
    first: int = 0,
    trainable: int = 8,
) -> None:
    rows = len(names)
    counts = {
        "numel": [100] * rows,
        "steps": [steps] * rows,
        "called": [called] * rows,
        "silent_calls": [silent] * rows,
        "watched": [watched] * rows,
        "longest": [longest] * rows,
        "had": [had] * rows,
        "place": list(range(first, first + rows)),
        "trainable": [trainable] * rows,
    }
    run.steps([step], columns={"trainable_tensors": trainable, "without_gradient": rows})
    add(run, step, "no_gradient", names, counts=counts)


def flow(**said_of: int) -> RunBuilder:
    run = RunBuilder()
    without(run, 4, NAMES[: said_of.pop("rows", 2)], **said_of)
    return run


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        pytest.param(flow(trainable=2), [("nothing", "warning")], id="no parameter at all"),
        pytest.param(flow(), [("detached", "warning")], id="the first layers"),
        pytest.param(flow(had=1), [("lost", "warning")], id="no more"),
        pytest.param(flow(first=4), [("unused", "info")], id="a branch that is not used"),
        pytest.param(flow(called=0), [("unused", "info")], id="the first layer is not called"),
        pytest.param(flow(called=0, silent=3), [("unused", "info")], id="under no_grad"),
        pytest.param(flow(called=0, watched=0), [("unused", "info")], id="compiled, and few"),
        pytest.param(
            flow(called=0, watched=0, rows=4, trainable=6),
            [("detached", "warning")],
            id="compiled, and most",
        ),
        pytest.param(flow(steps=4), [], id="not for long"),
        pytest.param(flow(longest=3), [], id="tasks that take turns"),
        pytest.param(flow(steps=9, longest=3), [("detached", "warning")], id="longer than a turn"),
    ],
)
def test_parameters_without_a_gradient(run: RunBuilder, expected: list[tuple[str, str]]) -> None:
    assert [(branch, severity) for branch, severity, _ in said(run, FLOW)] == expected


def test_gradients_that_arrive_end_the_issue() -> None:
    run = flow()
    run.steps([9], columns={"trainable_tensors": 8.0, "without_gradient": 0.0})
    assert [state for *_, state in said(run, FLOW)] == ["firing", "resolved"]
    (issue,) = [i for i in issues_of(run.records, specs=FLOW) if i.state == "firing"]
    assert (issue.first_step, issue.subject.name, issue.evidence.followed) == (0, "0.weight", 1)


def test_micro_batches_whose_gradients_no_step_uses() -> None:
    run = RunBuilder()
    run.steps([20], columns={"gradients_discarded": 7.0, "steps_discarding": 19.0})
    assert said(run, FLOW) == [("discarded", "warning", "firing")]
    (issue,) = issues_of(run.records, specs=FLOW)
    assert (issue.first_step, issue.subject.name) == (2, "gradients")
    assert issue.reason.startswith("the gradients of 7 of the 8 micro-batches of each step")
    run.steps([60], columns={"gradients_discarded": 0.0, "steps_discarding": 0.0})
    assert [state for *_, state in said(run, FLOW)] == ["firing", "resolved"]


def test_a_cut_and_what_is_not_used_are_two_issues() -> None:
    run = RunBuilder()
    counts = {
        "numel": [100, 100], "steps": [5, 5], "called": [3, 0], "silent_calls": [0, 0],
        "watched": [3, 3], "longest": [0, 0], "had": [0, 0], "place": [0, 7], "trainable": [8, 8],
    }  # fmt: skip
    add(run, 4, "no_gradient", ("0.weight", "pooler.weight"), counts=counts)
    assert {branch for branch, *_ in said(run, FLOW)} == {"detached", "unused"}


def frozen(of: int) -> RunBuilder:
    run = RunBuilder()
    run.steps(range(6), columns={"trainable_tensors": 2.0, "without_gradient": 0.0})
    add(
        run,
        5,
        "untrained",
        NAMES[:3],
        columns={
            "std": [0.1] * 3,
            "absmax": [0.17] * 3,
            "kurtosis": [1.8] * 3,
            "bound": [0.18] * 3,
        },
        counts={"numel": [900] * 3, "normal": [0] * 3, "matrices": [of] * 3, "frozen": [3] * 3},
    )
    return run


def test_a_backbone_that_is_frozen_untrained_is_a_warning() -> None:
    (issue,) = issues_of(frozen(of=4).records, specs=FLOW)
    assert (issue.branch, issue.severity, issue.state) == ("untrained", "warning", "firing")
    assert (issue.subject.name, issue.evidence.followed) == ("0.weight", 2)
    facts = {fact.name: fact.value for fact in issue.evidence.facts}
    assert (facts["frozen_share"], facts["untrained"]) == (0.75, 3)
    assert facts["bound"] == pytest.approx(0.18)
    assert said(frozen(of=6), FLOW) == []


# -- unchanged_tensor: parameters in no optimizer -------------------------------------------


def unowned(*, inside: int, last: int, orphans: int, looks: tuple[int, ...] = (2, 5)) -> RunBuilder:
    run = RunBuilder()
    for step in looks:
        add(
            run,
            step,
            "not_optimized",
            ("head.weight",),
            counts={"numel": [10], "inside": [inside], "last": [last], "orphans": [orphans]},
        )
    return run


def test_what_no_optimizer_has_is_a_warning_where_it_is_of_the_trained_model() -> None:
    expected = [("in_no_optimizer", "warning", "firing")]
    assert said(unowned(inside=1, last=1, orphans=0), UNCHANGED) == expected
    assert said(unowned(inside=1, last=1, orphans=2), UNCHANGED) == expected
    assert said(unowned(inside=0, last=0, orphans=2), UNCHANGED) == expected
    assert said(unowned(inside=1, last=0, orphans=0), UNCHANGED) == expected
    critic = [("in_no_optimizer", "info", "firing")]
    assert said(unowned(inside=0, last=0, orphans=0), UNCHANGED) == critic
    assert said(unowned(inside=0, last=1, orphans=0), UNCHANGED) == critic
    assert said(unowned(inside=1, last=1, orphans=0, looks=(2,)), UNCHANGED) == []


# -- dead_optimizer_state -------------------------------------------------------------------


def state(
    first: Sequence[int], second: Sequence[int], *, gradients: float = 1.0, steps: int = 1
) -> RunBuilder:
    """Zeros of 100 in the two moments of each parameter."""
    run = RunBuilder()
    names = [f"{n}.weight" for n in range(len(first))]
    for step in range(steps):
        run.tensors(100 * step, "gradients", names, columns={"absmax": gradients})
        rows = [f"{n}.{kind}" for n in names for kind in ("exp_avg", "exp_avg_sq")]
        zeros = [z for pair in zip(first, second, strict=True) for z in pair]
        counts = {"numel": [100] * len(rows), "zeros": zeros}
        add(run, 100 * step, "optimizer_state", rows, counts=counts)
    return run


@pytest.mark.parametrize(
    ("run", "branches"),
    [
        pytest.param(state([100] * 4, [100] * 4), ["empty"], id="never updated"),
        pytest.param(state([0] * 4, [90] * 4), ["underflow"], id="squares underflow"),
        pytest.param(state([0] * 4, [0] * 4), [], id="healthy"),
        pytest.param(state([80] * 4, [80] * 4), [], id="embeddings"),
        pytest.param(state([100] * 4, [100] * 4, gradients=0.0), [], id="no gradients"),
        pytest.param(state([100] + [0] * 9, [100] + [0] * 9), [], id="one of ten"),
        pytest.param(state([100], [100]), ["empty"], id="one tensor"),
        pytest.param(state([0] * 4, [90] * 4, steps=4), ["underflow"], id="once for all"),
        pytest.param(state([100] * 4, [100] * 4, gradients=math.nan), [], id="no numbers"),
    ],
)
def test_what_an_optimizer_remembers(run: RunBuilder, branches: list[str]) -> None:
    found = [b for b, _, state in said(run, STATE) if state == "firing"]
    assert found == branches


def test_an_optimizer_that_is_made_anew_at_each_step() -> None:
    run = RunBuilder()
    run.steps([3], columns={"optimizer_renewed": 3.0})
    run.steps([6], columns={"optimizer_renewed": 6.0})
    run.steps([7], columns={"optimizer_renewed": 0.0})
    assert said(run, STATE) == [("renewed", "warning", s) for s in ("firing", "resolved")]
    assert issues_of(run.records, specs=STATE)[0].first_step == 0


def test_a_restart_in_the_middle_changes_nothing() -> None:
    runs = (
        (clipped([2.0] * 60, [1e-4] * 20 + [1.0] * 40), CLIPPING),
        (uncleared((51, 2.0), (53, 4.0), (54, 0.0)), CLEARED),
        (state([0] * 4, [90] * 4, steps=4), STATE),
        (unowned(inside=1, last=1, orphans=0), UNCHANGED),
        (flow(), FLOW),
    )
    for run, specs in runs:
        assert half_way(run.records, specs) == issues_of(run.records, specs=specs)
