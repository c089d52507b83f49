"""The preset `sagemaker`: fires where SageMaker Debugger documents that its rule does, and only
there; beside it, what the default says of the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.testing import RunBuilder, issues_of

Make = Callable[[RunBuilder], None]

ROWS = ("head.weight", "body.weight", "stem.weight", "stem.bias")


def preset(rule: str, **params: Plain) -> tuple[RuleSpec, ...]:
    entry = RuleEntry.model_construct(
        name=rule, use=rule, preset="sagemaker", params=params, match={}
    )
    return rule_specs([entry], defaults="none")


def default(rule: str, **params: Plain) -> tuple[RuleSpec, ...]:
    return rule_specs([RuleEntry(name=rule, use=rule, params=params)], defaults="none")


def firing(make: Make, specs: Sequence[RuleSpec]) -> list[str]:
    """The branches that fire, "" for a rule with one condition."""
    run = RunBuilder()
    run.started()
    make(run)
    run.ended()
    return [one.branch for one in issues_of(run.records, specs=specs) if one.state == "firing"]


def losses(values: Sequence[float], every: int = 1) -> Make:
    steps = range(0, every * len(values), every)
    return lambda run: run.steps(steps, loss=list(values))


def evaluations(pairs: Sequence[tuple[float, float]]) -> Make:
    def make(run: RunBuilder) -> None:
        for i, (train, evaluation) in enumerate(pairs):
            run.steps(range(30 * i, 30 * i + 30), loss=train, per_frame=10)
            run.steps([30 * i + 29], mode="eval", loss=evaluation)

    return make


def gradients(*sizes: Sequence[float]) -> Make:
    """Summaries of four gradients of 100 elements, by their mean absolute value."""

    def make(run: RunBuilder) -> None:
        for step, size in enumerate(sizes):
            run.steps([step], loss=1.0)
            run.tensors(step, "gradients", ROWS, columns={"l1": 100 * np.asarray(size)})

    return make


def weights(*values: float, rates: float = 0.1) -> Make:
    """Summaries of frozen weights: no gradient reaches them."""

    def make(run: RunBuilder) -> None:
        for step, value in enumerate(values):
            run.steps([step], loss=1.0, columns={"lr.0": rates})
            run.tensors(step, "weights", ROWS, columns={"mean": value})

    return make


def updates(*ratios: float) -> Make:
    def make(run: RunBuilder) -> None:
        for step, ratio in enumerate(ratios):
            run.steps([step], loss=1.0)
            run.tensors(step, "updates", ROWS, columns={"l2": 1.0, "update_l2": ratio})

    return make


def bad_activations(run: RunBuilder) -> None:
    run.steps([0], loss=1.0)
    run.tensors(0, "activations", ROWS, infs={"body.weight": 3})
    run.steps(range(1, 30), loss=1.0)


FALLING = [2.0 * 0.99**n for n in range(60)]
HEALTHY = [1e-3] * 4
ONE_VANISHED = [1e-3, 1e-3, 1e-3, 1e-9]


@pytest.mark.parametrize(
    ("rule", "make", "fired"),
    [
        pytest.param("ExplodingTensor", bad_activations, ["tensor"], id="any tensor, not finite"),
        pytest.param("ExplodingTensor", losses(FALLING), [], id="finite"),
        pytest.param("VanishingGradient", gradients(HEALTHY, ONE_VANISHED), ["share"], id="one"),
        pytest.param("VanishingGradient", gradients(*[HEALTHY] * 9), [], id="gradients of 1e-3"),
        pytest.param("WeightUpdateRatio", updates(0.01, 11.0), ["large"], id="above 10, once"),
        pytest.param("WeightUpdateRatio", updates(0.01, 1e-10), ["small"], id="a rate of 1e-10"),
        pytest.param("WeightUpdateRatio", updates(0.01, 1e-3, 5.0), [], id="between both"),
        pytest.param("UnchangedTensor", weights(1.0, 2.0, 2.0, 2.0), [""], id="three equal"),
        pytest.param("UnchangedTensor", weights(1.0, 1.0, 1.0001, 1.0001), [], id="two equal"),
        pytest.param("LossNotDecreasing", losses(FALLING), [], id="falls"),
        pytest.param("LossNotDecreasing", losses([1.0] * 11), ["flat"], id="equal, 10 steps on"),
        pytest.param("LossNotDecreasing", losses([1.0] * 10), [], id="not looked at before"),
        pytest.param(
            "LossNotDecreasing", losses([*FALLING[:20], 3.0]), ["rising"], id="5 % above"
        ),
        pytest.param(
            "LossNotDecreasing", losses([1.0, 0.9, 0.8, 0.7, 0.6, 0.65], 3), [], id="every third"
        ),
        pytest.param("Overfit", evaluations([(0.5, 0.54), (0.5, 0.56)]), [""], id="a gap of 12 %"),
        pytest.param("Overfit", evaluations([(0.5, 0.54)] * 3), [], id="a gap of 8 %"),
        pytest.param(
            "Overtraining", evaluations([(1.0, 9 - n) for n in range(6)]), ["train"], id="train"
        ),
        pytest.param(
            "Overtraining",
            evaluations([(20.0 - n, 0.5 - 0.001 * min(n, 1)) for n in range(11)]),
            ["validation"],
            id="improves by less than 0.01",
        ),
        pytest.param(
            "Overtraining", evaluations([(20.0 - n, 9.0 - n / 50) for n in range(9)]), [], id="both"
        ),
        pytest.param("LossNotDecreasing", losses([]), [], id="nothing"),
    ],
)  # fmt: skip
def test_the_documented_condition(rule: str, make: Make, fired: list[str]) -> None:
    assert firing(make, preset(rule)) == fired


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("nonfinite", bad_activations),
        ("vanishing_gradient", gradients(HEALTHY, ONE_VANISHED)),
        ("weight_update_ratio", updates(0.01, 11.0)),
        ("unchanged_tensor", weights(1.0, 2.0, 2.0, 2.0)),
        ("loss_not_decreasing", losses([1.0] * 11)),
        ("overfit", evaluations([(0.5, 0.54), (0.5, 0.56)])),
    ],
)
def test_the_defaults_are_quiet_there(rule: str, make: Make) -> None:
    assert firing(make, default(rule)) == []


@pytest.mark.parametrize(("silent_s", "fires"), [(1799, False), (1802, True)])
def test_stalled_after_half_an_hour(silent_s: int, fires: bool) -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(10), loss=1.0, step_time_s=0.1)
    for _ in range(silent_s // 10):
        run.wait(10)
        run.heartbeat(last_step=9)
    run.wait(silent_s % 10)
    found = issues_of(run.records, specs=preset("StalledTrainingRule"), until_ms=run.now_ms)
    assert bool(found) is fires


def test_what_a_file_says_comes_after_the_preset() -> None:
    make = losses([1.0] * 6)
    assert firing(make, preset("LossNotDecreasing", num_steps=5)) == ["flat"]
    assert firing(losses([1.0] * 11), preset("LossNotDecreasing", patience=2)) == []


def test_a_loss_against_the_one_before_over_gaps() -> None:
    """Saved every third step, the one that is compared is the newest that is ten steps older."""
    run = RunBuilder()
    run.steps(range(0, 40, 3), loss=[5.0, 4.0, 3.0, 2.0, 1.0, *[0.5] * 9])
    (issue,) = [
        one
        for one in issues_of(run.records, specs=preset("LossNotDecreasing"))
        if one.state == "firing"
    ]
    assert issue.reason == "the loss has not fallen: 0.5 at step 36 after 0.5 at step 24"
    assert issue.first_step == 24
