"""`overfit` and `overtraining`, on made series and on real trainings with evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.trainings.watched import watch
from tocsin.console.demo.trainings.resnet import digits
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

OVERFIT = only("overfit")
OVERTRAINING = only("overtraining")


def run_of(pairs: list[tuple[float, float]], *, batches: int = 3, every: int = 50) -> RunBuilder:
    """Each pair is (training loss, evaluation loss); an evaluation after each `every` steps."""
    run = RunBuilder()
    run.started()
    for i, (train, evaluation) in enumerate(pairs):
        steps = range(i * every, (i + 1) * every)
        run.steps(steps, loss=train, per_frame=7)
        run.steps([steps[-1]] * batches, mode="eval", loss=evaluation)
    run.ended()
    return run


def test_an_evaluation_loss_that_rises_above_the_training_loss() -> None:
    pairs = [(2.0, 2.1), (1.0, 1.2), (0.7, 1.1), (0.5, 1.15), (0.3, 1.2), (0.2, 1.3)]
    pairs += [(0.1, 1.4), (0.1, 1.5), (0.1, 1.6), (0.1, 1.7), (0.1, 1.8)]
    issue = assert_fires(run_of(pairs).records, "overfit", first_step=199, specs=OVERFIT)
    assert (issue.severity, issue.stop_worthy) == ("warning", False)
    assert "1.1 at step 149" in issue.reason


def test_it_resolves_when_the_evaluation_is_the_best_again() -> None:
    pairs = [(1.0, 1.2), *[(0.5, 1.5)] * 6, (0.4, 1.0)]
    issues = issues_of(run_of(pairs).records, specs=OVERFIT)
    assert [i.state for i in issues] == ["firing", "resolved"]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(1.0 / n, 2.0 / n) for n in range(1, 20)], id="a gap, but improving"),
        pytest.param([(1.0, 0.9)] * 20, id="evaluation below training"),
        pytest.param([(0.5, 1.0)] * 20, id="a gap, standing still"),
        pytest.param([(0.5, 1.0), *[(0.5, 1.2)] * 4], id="four evaluations"),
        pytest.param(
            [*[(0.5, 3.0 - 0.05 * n) for n in range(40)], *[(0.5, 2.0)] * 9, (0.5, 1.0)],
            id="a fifth of the evaluations",
        ),
        pytest.param([(0.5, 1.0), *[(0.5, 1.04)] * 20], id="little above the best"),
        pytest.param(
            [(0.1, v) for v in (2.1, 0.8, 0.3, 0.2, 0.11, *[0.14, 0.12, 0.15, 0.12] * 5)],
            id="a plateau that scatters",
        ),
        pytest.param([(0.5, math.nan)] * 20, id="all NaN"),
        pytest.param([(-1.0 - n, -1.0 - n) for n in range(20)], id="negative"),
    ],
)
def test_left_alone(pairs: list[tuple[float, float]]) -> None:
    assert_quiet(run_of(pairs).records, specs=OVERFIT)


@pytest.mark.parametrize("warm_up", [0, 400])
def test_evaluations_in_the_warm_up_are_not_looked_at(warm_up: int) -> None:
    run = RunBuilder()
    run.started()
    for i, loss in enumerate([11.1, *[22.1] * 7, *[15.0 - i for i in range(8)], 4.0]):
        steps = range(50 * i, 50 * i + 50)
        rates = [1e-3 * min(1.0, (step + 1) / max(1, warm_up)) for step in steps]
        run.steps(steps, columns={"loss": 0.5, "lr.0": rates}, per_frame=10)
        run.steps([steps[-1]], mode="eval", loss=loss)
    run.ended()
    assert bool(issues_of(run.records, specs=OVERFIT)) is (warm_up == 0)


def test_losses_that_arrive_late_belong_to_their_evaluation() -> None:
    run = RunBuilder()
    for i, loss in enumerate([1.0, *[1.5] * 5]):
        run.steps(range(50 * i, 50 * i + 50), loss=0.5)
        run.steps([50 * i + 49], mode="eval", loss=loss)
        run.steps(range(50 * i + 50, 50 * i + 60), loss=0.5)
        run.steps([50 * i + 49] * 2, mode="eval", loss=loss)
        run.again(run.records[-1])
    run.ended()
    issue = assert_fires(run.records, "overfit", first_step=99, specs=OVERFIT)
    assert issue.evidence.series is not None
    assert issue.evidence.series.steps == (49, 99, 149, 199, 249, 299)


def test_a_higher_rank_and_a_resumed_run_are_kept_apart() -> None:
    run = run_of([(1.0, 1.2), (0.5, 1.5)])
    run.steps([99], rank=1, mode="eval", loss=0.1)
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started()
    for i in range(2):
        run.steps(range(50 * i, 50 * i + 50), loss=0.5)
        run.steps([50 * i + 49], mode="eval", loss=1.5)
    run.ended()
    assert_quiet(run.records, specs=OVERFIT)


def test_a_rank_that_evaluates_alone_is_read() -> None:
    run = RunBuilder(world_size=3)
    for i, loss in enumerate([1.0, *[1.5] * 5]):
        for rank in (2, 0, 1):
            run.steps(range(50 * i, 50 * i + 50), rank=rank, loss=[0.5, 9.0, 9.0][rank])
        for rank in (2, 1):
            run.steps([50 * i + 49], rank=rank, mode="eval", loss=loss + rank - 1)
    run.ended(rank=1)
    issue = assert_fires(run.records, "overfit", first_step=99, specs=OVERFIT)
    assert issue.evidence.series is not None
    assert issue.evidence.series.values == (1.0, *[1.5] * 5)


def test_training_losses_alone_are_no_input_and_that_is_said_at_the_end() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(300), loss=2.0, gradient_norm=1.0, columns={"lr.0": 1e-3}, per_frame=10)
    entry = [RuleEntry(name="overfit", use="overfit")]
    assert issues_of(run.records, specs=rule_specs(entry, defaults="none")) == []
    run.ended()
    specs = rule_specs([*entry, RuleEntry(name="rule_has_no_input", use="rule_has_no_input")])
    found = issues_of(run.records, "rule_has_no_input", specs=specs)
    assert [i.subject.name for i in found if i.severity == "warning"] == ["overfit"]


def test_no_word_of_it_where_it_only_runs_by_default() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(300), loss=2.0, gradient_norm=1.0, columns={"lr.0": 1e-3}, per_frame=10)
    run.ended()
    assert issues_of(run.records) == []


# -- overtraining


def test_each_loss_says_when_it_stands_still() -> None:
    pairs = [(2.0, 2.0), *[(1.0, 1.5)] * 12]
    issues = issues_of(run_of(pairs).records, specs=OVERTRAINING)
    assert [(i.severity, i.evidence.facts[0].value) for i in issues] == [
        ("info", "train"),
        ("info", "validation"),
    ]
    assert "has not improved by 1 % for 10 evaluations" in issues[1].reason


@pytest.mark.parametrize(
    ("params", "by"), [({}, " by 1 %"), ({"relative": False}, " by 0.01"), ({"delta": 0.0}, "")]
)
def test_what_counts_as_an_improvement_is_in_the_reason(params: dict[str, Any], by: str) -> None:
    pairs = [(1.0, 0.8178), *[(1.0 - 0.1 * i, 0.8178 - 1e-5 * (not params) * i) for i in range(11)]]
    specs = only("overtraining", **params)
    reason = assert_fires(run_of(pairs).records, "overtraining", specs=specs).reason
    assert reason.startswith(f"the evaluation loss has not improved{by} for 10 evaluations: it is ")
    assert reason.endswith(", and was 0.8178 at step 49")


def test_the_training_loss_alone_may_go_on() -> None:
    pairs = [(2.0 * 0.9**n, 1.5) for n in range(12)]
    issue = assert_fires(run_of(pairs).records, "overtraining", specs=OVERTRAINING)
    assert issue.evidence.facts[0].value == "validation"


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(2.0 * 0.9**n, 2.0 * 0.9**n) for n in range(30)], id="improving"),
        pytest.param([(1.0, 1.0)] * 5, id="few evaluations"),
        pytest.param([(math.nan, math.nan)] * 30, id="all NaN"),
    ],
)
def test_left_alone_too(pairs: list[tuple[float, float]]) -> None:
    assert issues_of(run_of(pairs).records, specs=OVERTRAINING) == []


# -- real trainings


Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fit(criterion: Criterion, *, images: int, rounds: int, noise: float) -> None:
    """A perceptron on some digits, evaluated on others every 20 steps."""
    torch.manual_seed(0)
    x, y = digits()
    chance = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=chance)
    train, held = order[:images], order[1200:1600]
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.0), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(20 * rounds):
        chosen = train[torch.randint(images, (32,), generator=chance)]
        batch = x[chosen] + noise * torch.randn(x[chosen].shape, generator=chance)
        loss = criterion(model(batch), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                for part in held.split(200):
                    criterion(model(x[part] + 0.7), y[part])
            model.train()


def by_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels)


def issues(folder: Path, rule: str, **kwargs: object) -> list[IssueFiring]:
    criterion = kwargs.pop("criterion", by_function)
    return watch(
        folder,
        lambda: fit(criterion, **kwargs),  # type: ignore[arg-type]
        specs=only(rule),
    )


@pytest.mark.parametrize("criterion", [by_function, nn.CrossEntropyLoss()])
def test_forty_images_are_learned_by_heart(tmp_path: Path, criterion: Criterion) -> None:
    found = issues(tmp_path, "overfit", criterion=criterion, images=40, rounds=25, noise=0.0)
    assert found[0].state == "firing"


def test_a_thousand_with_noise_are_not(tmp_path: Path) -> None:
    assert issues(tmp_path, "overfit", images=1200, rounds=15, noise=0.7) == []


def test_going_on_for_nothing_is_said(tmp_path: Path) -> None:
    found = issues(tmp_path, "overtraining", images=40, rounds=30, noise=0.0)
    assert "validation" in {issue.evidence.facts[0].value for issue in found}


def test_a_training_that_still_learns_is_not_told_so(tmp_path: Path) -> None:
    assert issues(tmp_path, "overtraining", images=1200, rounds=8, noise=0.7) == []


def test_only_the_steps_before_an_evaluation_stand_beside_it() -> None:
    """It is known to be complete only when the training has gone on."""
    run = RunBuilder()
    run.steps(range(50), loss=1.0)
    run.steps([49], mode="eval", loss=1.05)
    run.steps(range(50, 100), loss=0.2)
    assert issues_of(run.records, specs=only("overfit", rising=False, patience=1)) == []
