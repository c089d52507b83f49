"""Rules on what a model is fed and what its loss gets, on made events: each branch, its edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from support.records.counted import classes
from support.rules.restarted import half_way
from tocsin.schemas.records.program_facts import LayerInputsSeen, LossInputsSeen, ModeSeen
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

LOSSES = only("loss_input_mismatch")
COLLAPSED = only("collapsed_predictions")
MODES = only("evaluation_in_train_mode")
INPUTS = only("unnormalised_inputs")
STEPS = (1, 2, 3, 4, 5, 8, 12, 20)

WHO = {"run_id": "made", "incarnation": "made-1"}
LOGITS: dict[str, Any] = {
    "minimum": -3.0, "maximum": 2.5, "row_sum_min": -4.0, "row_sum_max": 5.0,
    "exp_sum_min": 2.0, "exp_sum_max": 30.0, "spread": 0.8, "classes": 10, "made_by": "addmm",
}  # fmt: skip
SHARES: dict[str, Any] = {
    "minimum": 0.01, "maximum": 0.9, "row_sum_min": 0.99999, "row_sum_max": 1.00001,
    "exp_sum_min": 10.5, "exp_sum_max": 11.0, "spread": 0.1, "classes": 10, "made_by": "",
}  # fmt: skip
SCORES: dict[str, Any] = {"minimum": -3.0, "maximum": 2.5, "spread": 0.8, "made_by": "addmm"}


def said(run: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[tuple[str, str, str]]:
    return [(i.branch, i.severity, i.state) for i in issues_of(run.records, specs=specs)]


def look(run: RunBuilder, step: int, function: str, /, rank: int = 0, **told: Any) -> None:
    fields = {"rows": 64, "function": function, "step": step, "rank": rank, **WHO, **told}
    run.event(LossInputsSeen.model_validate(fields), rank=rank)


def looks(function: str, /, steps: Sequence[int] = STEPS, **told: Any) -> RunBuilder:
    run = RunBuilder()
    for step in steps:
        look(run, step, function, **told)
    return run


# -- loss_input_mismatch --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "branch", "step"),
    [
        pytest.param(looks("cross_entropy", **SHARES), "probabilities_as_logits", 2, id="rows"),
        pytest.param(
            looks("cross_entropy", **{**LOGITS, "made_by": "sigmoid"}),
            "probabilities_as_logits",
            2,
            id="sigmoid",
        ),
        pytest.param(
            looks("cross_entropy", **{**LOGITS, "made_by": "relu"}), "cut_off_logits", 2, id="relu"
        ),
        pytest.param(looks("nll_loss", **SHARES), "probabilities_as_logarithms", 2, id="nll"),
        pytest.param(looks("nll_loss", **LOGITS), "logits_as_logarithms", 2, id="nll of logits"),
        pytest.param(
            looks("binary_cross_entropy_with_logits", **{**SCORES, "made_by": "sigmoid"}),
            "probabilities_as_logits",
            2,
            id="sigmoid twice",
        ),
        pytest.param(
            looks(
                "binary_cross_entropy_with_logits",
                minimum=0.2, maximum=0.8, spread=0.1, made_by="",
            ),
            "probabilities_as_logits",
            5,
            id="sigmoid twice, as the numbers say",
        ),
        pytest.param(
            looks("binary_cross_entropy_with_logits", **SCORES, target_min=1.0, target_max=2.0),
            "targets_out_of_range",
            2,
            id="classes 1 and 2",
        ),
        pytest.param(
            looks("mse_loss", **{**SCORES, "made_by": "sigmoid"}, unreachable=0.6),
            "unreachable_targets",
            2,
            id="sigmoid against standardised targets",
        ),
        pytest.param(looks("mse_loss", **SCORES, broadcast=True), "each_with_each", 2, id="shapes"),
    ],
)  # fmt: skip
def test_a_loss_that_is_given_something_else(run: RunBuilder, branch: str, step: int) -> None:
    issue = assert_fires(run.records, "loss_input_mismatch", first_step=1, specs=LOSSES)
    assert (issue.branch, issue.severity) == (branch, "warning")
    early = [e for e in issues_of(run.records[: STEPS.index(step)], specs=LOSSES)]
    assert early == []


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(looks("cross_entropy", **LOGITS), id="logits"),
        pytest.param(
            looks("cross_entropy", **{**LOGITS, "minimum": 0.1, "maximum": 0.1,
                  "row_sum_min": 1.0, "row_sum_max": 1.0}),
            id="logits that are all a tenth",
        ),
        pytest.param(
            looks("cross_entropy", **{**LOGITS, "minimum": 0.0, "maximum": 0.9}), id="positive"
        ),
        pytest.param(
            looks("nll_loss", **{**LOGITS, "maximum": -0.01, "made_by": "log_softmax"}), id="nll"
        ),
        pytest.param(
            looks("nll_loss", **{**LOGITS, "maximum": 1e-6, "made_by": "log"}), id="nll of a log"
        ),
        pytest.param(
            looks("binary_cross_entropy", **{**SCORES, "made_by": "sigmoid"},
                  target_min=0.0, target_max=1.0),
            id="binary",
        ),
        pytest.param(
            looks("binary_cross_entropy_with_logits", **SCORES, target_min=0.05, target_max=0.95),
            id="smoothed labels",
        ),
        pytest.param(
            looks("mse_loss", **{**SCORES, "made_by": "tanh"}, unreachable=0.02), id="a few out"
        ),
        pytest.param(looks("cross_entropy", STEPS[:1], **SHARES), id="one look"),
        pytest.param(looks("cross_entropy", **{**SHARES, "mode": "eval"}), id="an evaluation"),
        pytest.param(
            looks("cross_entropy", minimum=math.nan, maximum=math.nan, row_sum_min=math.nan,
                  row_sum_max=math.nan, classes=10, made_by="addmm"),
            id="no numbers",
        ),
    ],
)  # fmt: skip
def test_what_losses_are_made_for_is_left_alone(run: RunBuilder) -> None:
    assert issues_of(run.records, specs=LOSSES) == []


def test_a_log_softmax_twice_is_an_info() -> None:
    run = looks("cross_entropy", **{**LOGITS, "made_by": "log_softmax"})
    assert said(run, LOSSES) == [("logarithms_as_logits", "info", "firing")]


def test_two_calls_of_a_step_are_one_look_and_both_must_be_so() -> None:
    twice = RunBuilder()
    for _ in range(3):
        look(twice, 1, "cross_entropy", **SHARES)
    assert issues_of(twice.records, specs=LOSSES) == []
    mixed = RunBuilder()
    for step in STEPS:
        look(mixed, step, "cross_entropy", **SHARES)
        look(mixed, step, "cross_entropy", **LOGITS)
    assert issues_of(mixed.records, specs=LOSSES) == []


def test_other_ranks_add_nothing() -> None:
    run = RunBuilder(world_size=2)
    for step in STEPS[:1]:
        look(run, step, "cross_entropy", **SHARES)
    for step in STEPS:
        look(run, step, "cross_entropy", rank=1, **SHARES)
    assert issues_of(run.records, specs=LOSSES) == []


# -- collapsed_predictions ------------------------------------------------------------------


def test_scores_that_are_the_same_for_all_samples() -> None:
    run = looks("cross_entropy", **{**LOGITS, "spread": 0.0})
    issue = assert_fires(run.records, "collapsed_predictions", first_step=1, specs=COLLAPSED)
    assert (issue.branch, issue.severity) == ("constant", "warning")
    assert issues_of(run.records[:5], specs=COLLAPSED) == []


def test_scores_that_differ_or_inputs_that_do_not_are_left_alone() -> None:
    assert issues_of(looks("cross_entropy", **LOGITS).records, specs=COLLAPSED) == []
    assert issues_of(looks("mse_loss", rows=1, **SCORES).records, specs=COLLAPSED) == []
    run = RunBuilder()
    layer(run, 1, sample_std=0.0)
    for step in STEPS:
        look(run, step, "cross_entropy", **{**LOGITS, "spread": 0.0})
    assert issues_of(run.records, specs=COLLAPSED) == []


def test_a_model_that_wakes_up_ends_the_issue() -> None:
    run = looks("cross_entropy", **{**LOGITS, "spread": 0.0})
    look(run, 30, "cross_entropy", **LOGITS)
    assert [state for *_, state in said(run, COLLAPSED)] == ["firing", "resolved"]


ONE = [[0, 50, 0], [0, 50, 0], [0, 50, 0]]
GOOD = [[40, 5, 5], [5, 40, 5], [5, 5, 40]]
BACKGROUND = [[190, 0, 0], [5, 0, 0], [5, 0, 0]]


def predicted(*tables: Sequence[Sequence[int]], mode: str = "train", apart: int = 50) -> RunBuilder:
    run = RunBuilder()
    for i, table in enumerate(tables):
        run.steps([apart * (i + 1)], loss=1.0)
        classes(run, apart * (i + 1), table, mode="eval" if mode == "eval" else "train")
    return run


def test_predictions_of_one_class() -> None:
    run = predicted(ONE, ONE, ONE, ONE)
    issue = assert_fires(run.records, "collapsed_predictions", first_step=50, specs=COLLAPSED)
    assert (issue.branch, issue.step) == ("one_class", 150)
    assert [s for *_, s in said(predicted(ONE, ONE, ONE, GOOD), COLLAPSED)] == [
        "firing",
        "resolved",
    ]
    assert said(predicted(ONE, ONE, ONE, ONE, mode="eval"), COLLAPSED)[0][0] == "one_class"


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(predicted(GOOD, GOOD, GOOD, GOOD), id="good ones"),
        pytest.param(predicted(ONE, ONE, GOOD, GOOD), id="the beginning"),
        pytest.param(predicted(ONE, ONE, ONE, ONE, apart=10), id="the first steps"),
        pytest.param(predicted(*[BACKGROUND] * 6), id="nearly all of the data"),
        pytest.param(predicted(*[[[10, 0], [10, 0]]] * 9), id="few samples"),
        pytest.param(predicted(*[[[0, 0], [0, 150]]] * 9), id="labels of one class"),
    ],
)
def test_predictions_of_healthy_models_are_left_alone(run: RunBuilder) -> None:
    assert issues_of(run.records, specs=COLLAPSED) == []


# -- evaluation_in_train_mode ---------------------------------------------------------------


def mode(run: RunBuilder, step: int, doing: str, layers_in: str, kind: str = "Dropout") -> None:
    run.event(
        ModeSeen.model_validate(
            {
                **WHO, "doing": doing, "layers_in": layers_in, "layers": 3, "first": "2",
                "kind": kind, "step": step,
            }
        )
    )  # fmt: skip


def test_an_evaluation_in_train_mode_is_told_at_once() -> None:
    run = RunBuilder()
    mode(run, 1, "training", "train")
    run.steps(range(2, 20), loss=1.0, step_time_s=0.1)
    mode(run, 19, "evaluation", "train")
    issue = assert_fires(run.records, "evaluation_in_train_mode", first_step=19, specs=MODES)
    assert (issue.branch, issue.severity) == ("evaluation_in_train_mode", "warning")


@pytest.mark.parametrize(
    ("before", "kind", "expected"),
    [
        pytest.param(True, "BatchNorm2d", "warning", id="not gone back to train()"),
        pytest.param(False, "Dropout", "warning", id="never in train()"),
        pytest.param(False, "BatchNorm2d", "info", id="statistics frozen"),
    ],
)
def test_training_in_eval_mode(before: bool, kind: str, expected: str) -> None:
    run = RunBuilder()
    if before:
        mode(run, 0, "training", "train", kind)
        run.steps(range(10), loss=1.0, step_time_s=0.1)
    mode(run, 10, "training", "eval", kind)
    run.steps(range(10, 14), loss=1.0, step_time_s=0.1)
    assert issues_of(run.records, specs=MODES) == []
    run.steps(range(14, 30), loss=1.0, step_time_s=0.1)
    mode(run, 30, "training", "train", kind)
    assert said(run, MODES) == [
        ("training_in_eval_mode", expected, state) for state in ("firing", "resolved")
    ]


def test_modes_as_they_should_be_are_left_alone() -> None:
    run = RunBuilder()
    mode(run, 1, "training", "train")
    mode(run, 5, "evaluation", "eval")
    run.steps(range(50), loss=1.0, step_time_s=0.1)
    mode(run, 50, "training", "eval")
    run.steps(range(50, 53), loss=1.0, step_time_s=0.1)
    mode(run, 53, "training", "train")
    run.steps(range(53, 90), loss=1.0, step_time_s=0.1)
    assert issues_of(run.records, specs=MODES) == []


# -- unnormalised_inputs --------------------------------------------------------------------


def layer(run: RunBuilder, step: int, **told: Any) -> None:
    fields = {
        "layer": "0", "kind": "Linear", "step": step, "values": 1280, "minimum": -3.0,
        "maximum": 3.0, "mean": 0.0, "std": 1.0, "sample_std": 1.0, **WHO, **told,
    }  # fmt: skip
    run.event(LayerInputsSeen.model_validate(fields))


def fed(*, supervised: bool = True, **told: Any) -> RunBuilder:
    run = RunBuilder()
    if supervised:
        look(run, 1, "cross_entropy", **LOGITS)
    for step in (2, 3, 4):
        layer(run, step, **told)
    return run


PIXELS: dict[str, Any] = {
    "minimum": 0.0,
    "maximum": 255.0,
    "mean": 33.0,
    "std": 78.0,
    "whole_numbers": True,
}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        pytest.param(fed(**PIXELS), [("raw_pixels", "warning")], id="pixels"),
        pytest.param(fed(maximum=1680.0, mean=69.0, std=215.0), [("large", "warning")], id="wine"),
        pytest.param(fed(minimum=-80.0, mean=-40.0), [("large", "info")], id="decibels"),
        pytest.param(fed(sample_std=0.0), [("constant", "warning")], id="all the same"),
        pytest.param(fed(supervised=False, sample_std=0.0), [("constant", "info")], id="one state"),
        pytest.param(fed(), [], id="standardised"),
        pytest.param(fed(minimum=0.0, maximum=1.0, mean=0.13, std=0.31), [], id="from 0 to 1"),
        pytest.param(
            fed(minimum=0.0, maximum=16.0, mean=4.9, std=6.0, whole_numbers=True), [], id="digits"
        ),
        pytest.param(fed(mean=math.nan, std=math.nan), [], id="no numbers"),
        pytest.param(fed(minimum=0.0, maximum=1.0, mean=0.05, std=0.2), [], id="one-hot"),
    ],
)
def test_the_inputs_of_the_first_layer(run: RunBuilder, expected: list[tuple[str, str]]) -> None:
    assert [(branch, severity) for branch, severity, _ in said(run, INPUTS)] == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param((101.0, 99.0, 101.0), "info", id="around the limit of a warning"),
        pytest.param((99.0, 101.0, 102.0), "warning", id="at last above it twice"),
    ],
)
def test_inputs_around_a_limit_are_found_at_the_severity_that_holds(
    sizes: Sequence[float], expected: str
) -> None:
    run = RunBuilder()
    for step, size in enumerate(sizes, 2):
        layer(run, step, maximum=1000.0, mean=0.0, std=size)
    assert [(branch, severity) for branch, severity, _ in said(run, INPUTS)][-1:] == [
        ("large", expected)
    ]


def test_one_look_is_not_enough() -> None:
    run = RunBuilder()
    layer(run, 2, **PIXELS)
    layer(run, 3)
    assert issues_of(run.records, specs=INPUTS) == []


def test_a_restart_in_the_middle_changes_nothing() -> None:
    modes = RunBuilder()
    mode(modes, 0, "training", "train")
    mode(modes, 10, "training", "eval")
    modes.steps(range(10, 40), loss=1.0, step_time_s=0.1)
    for run, specs in (
        (looks("cross_entropy", **SHARES), LOSSES),
        (predicted(ONE, ONE, ONE, ONE, GOOD), COLLAPSED),
        (looks("cross_entropy", **{**LOGITS, "spread": 0.0}), COLLAPSED),
        (modes, MODES),
        (fed(**PIXELS), INPUTS),
    ):
        found = issues_of(run.records, specs=specs)
        assert found
        assert half_way(run.records, specs) == found


# -- target_leak ----------------------------------------------------------------------------

LEAK = only("target_leak")
OPEN: dict[str, Any] = {
    **LOGITS, "tokens": 200, "targets_are_inputs": 0.0, "targets_are_next_inputs": 1.0,
    "ahead_least": 1.0, "ahead_most": 1.0,
}  # fmt: skip
COPIED: dict[str, Any] = {
    **OPEN, "targets_are_inputs": 1.0, "targets_are_next_inputs": 0.0,
    "ahead_least": 0.0, "ahead_most": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "branch"),
    [
        pytest.param(OPEN, "no_causal_mask", id="open"),
        pytest.param(
            {**OPEN, "targets_are_next_inputs": 0.91}, "no_causal_mask", id="some inputs are noise"
        ),
        pytest.param(COPIED, "unshifted_targets", id="copied"),
    ],
)
def test_a_model_that_is_given_its_targets(told: dict[str, Any], branch: str) -> None:
    run = looks("cross_entropy", STEPS[1:4], **told)
    issue = assert_fires(run.records, "target_leak", first_step=2, specs=LEAK)
    assert (issue.branch, issue.severity) == (branch, "warning")
    assert issues_of(run.records[:1], specs=LEAK) == []
    assert half_way(run.records, LEAK) == issues_of(run.records, specs=LEAK)


@pytest.mark.parametrize(
    ("least", "where"), [(1.0, "at all 200 positions"), (0.997, "at 99 % or more of 200 positions")]
)
def test_at_how_many_positions_is_a_share_that_can_be(least: float, where: str) -> None:
    run = looks("cross_entropy", STEPS[1:4], **{**OPEN, "ahead_least": least})
    assert assert_fires(run.records, "target_leak", specs=LEAK).reason.endswith(where)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({**OPEN, "ahead_least": 0.0}, id="one attention is causal"),
        pytest.param({**OPEN, "ahead_least": 0.5}, id="a prefix is open"),
        pytest.param({**OPEN, "targets_are_next_inputs": 0.5}, id="other targets"),
        pytest.param({**OPEN, "ahead_least": None, "ahead_most": None}, id="not known"),
        pytest.param({**OPEN, "mode": "eval"}, id="an evaluation"),
        pytest.param({**COPIED, "targets_are_inputs": 0.99}, id="corrections"),
        pytest.param({**COPIED, "ahead_most": 1.0}, id="an encoder"),
    ],
)
def test_a_model_that_is_not(told: dict[str, Any]) -> None:
    run = looks("cross_entropy", **told)
    assert issues_of(run.records, specs=LEAK) == []


@pytest.mark.parametrize("auxiliary", [True, False], ids=["before it", "after it"])
def test_a_second_loss_of_each_step_hides_nothing(auxiliary: bool) -> None:
    other = {**OPEN, "targets_are_next_inputs": 0.0}
    run = RunBuilder()
    for step in (2, 3, 4):
        for told in (other, OPEN) if auxiliary else (OPEN, other):
            look(run, step, "cross_entropy", **told)
    issue = assert_fires(run.records, "target_leak", first_step=2, specs=LEAK)
    assert issue.branch == "no_causal_mask"
    assert half_way(run.records, LEAK) == issues_of(run.records, specs=LEAK)


def test_a_loss_that_is_called_no_more_is_over() -> None:
    run = RunBuilder()
    for step in (2, 3):
        for _ in range(2):
            look(run, step, "cross_entropy", **OPEN)
    for step in (4, 5):
        look(run, step, "cross_entropy", **{**OPEN, "ahead_least": 0.0})
    assert [state for _, _, state in said(run, LEAK)] == ["firing", "resolved"]


def test_looks_that_say_nothing_are_passed_over_and_another_ends_it() -> None:
    run = looks("cross_entropy", (2,), **OPEN)
    look(run, 3, "cross_entropy", **LOGITS)
    look(run, 4, "cross_entropy", **OPEN)
    assert said(run, LEAK) == [("no_causal_mask", "warning", "firing")]
    look(run, 5, "cross_entropy", **{**OPEN, "ahead_least": 0.0})
    assert [state for _, _, state in said(run, LEAK)] == ["firing", "resolved"]
