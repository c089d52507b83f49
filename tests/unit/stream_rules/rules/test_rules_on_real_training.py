"""The rules on real trainings: each fault, and the same program without it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tocsin.console.demo.trainings.resnet import batches, digits
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.testing import RunBuilder, issues_of

ROUNDS = 120
FAULT_AT = 60


@cache
def train(fault: str | None, seed: int = 0) -> tuple[IssueFiring, ...]:
    """A perceptron on handwritten digits, watched by all rules; what they say."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )
    rate = 0.0 if fault == "no_rate" else 0.1
    rounds = 1400 if fault in ("no_rate", "long") else ROUNDS
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    data = batches(*digits(), batch=64, seed=seed)
    run = RunBuilder(f"digits-{fault}-{seed}", step_ms=5)
    run.started()
    run.loss_inputs(10)
    for step in range(rounds):
        images, labels = next(data)
        faulty = fault if step == FAULT_AT else None
        if faulty == "nan_batch":
            images[0] = float("nan")
        if faulty == "rate":
            optimizer.param_groups[0]["lr"] = 100.0
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if faulty == "nan_gradient":
            model[3].weight.grad[0, 0] = float("nan")
        if step % 20 == 0:
            run.checkpoint(max(0, step - 1))
        report(run, step, model, optimizer, loss.item())
        optimizer.step()
    run.ended()
    return tuple(issues_of(run.records))


def report(
    run: RunBuilder,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: float,
) -> None:
    """What a capture sends of a step: scalars, and summaries in backward order when due."""
    gradients = {name: p.grad for name, p in reversed(list(model.named_parameters()))}
    norm = float(torch.nn.utils.get_total_norm(gradients.values()))
    nans = {name: int(g.isnan().sum()) for name, g in gradients.items() if g.isnan().any()}
    infs = {name: int(g.isinf().sum()) for name, g in gradients.items() if g.isinf().any()}
    run.steps(
        [step],
        loss=loss,
        gradient_norm=norm,
        gradient_nonfinite=len({**nans, **infs}),
        step_time_s=0.005,
        columns={"lr.0": optimizer.param_groups[0]["lr"]},
    )
    if step % 10 == 0 or nans or infs or loss != loss:
        run.tensors(step, "gradients", list(gradients), nans=nans, infs=infs)


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_training_gives_no_issue(seed: int) -> None:
    assert train(None, seed) == ()


def test_a_corrupt_batch_is_the_loss_at_its_step() -> None:
    first = train("nan_batch")[0]
    assert (first.rule, first.first_step, first.subject.kind) == ("nonfinite", FAULT_AT, "loss")
    assert first.severity == "critical"
    assert first.stop_worthy
    assert first.last_good_checkpoint is not None
    # Of those at 0, 19, 39 and 59, the newest after which enough steps were healthy.
    assert (first.last_good_checkpoint.step, first.last_good_checkpoint.verified) == (0, True)


def test_one_bad_gradient_is_its_tensor_at_its_step() -> None:
    first = train("nan_gradient")[0]
    assert (first.rule, first.first_step) == ("nonfinite", FAULT_AT)
    assert (first.subject.kind, first.subject.name) == ("tensor", "3.weight")


def test_a_learning_rate_that_is_far_too_high_calls_for_a_stop() -> None:
    issues = train("rate")
    calling = next(issue for issue in issues if issue.stop_worthy)
    assert calling.rule in ("loss_diverged", "nonfinite")
    assert calling.severity == "critical"
    assert calling.first_step is not None
    assert FAULT_AT < calling.first_step <= FAULT_AT + 5
    assert calling.step is not None
    assert calling.step <= FAULT_AT + 30


@pytest.mark.slow
def test_a_learning_rate_of_zero_is_said_and_so_is_that_the_loss_does_not_fall() -> None:
    issues = [issue for issue in train("no_rate") if issue.state == "firing"]
    assert [issue.rule for issue in issues] == ["learning_rate_anomaly", "loss_not_decreasing"]
    assert {issue.severity for issue in issues} == {"warning"}
    assert not any(issue.stop_worthy for issue in issues)


@pytest.mark.torture  # in CI: shorter ones, and the recorded trainings of rule_quality
def test_the_same_length_with_a_rate_is_quiet() -> None:
    assert train("long") == ()
