"""The numerical rules on recorded real trainings: each fault, and the same program without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from fixtures.runs.recorded import recorded
from tocsin.console.demo.trainings.resnet import batches, digits
from tocsin.emitter.probes.checksums import Checksums
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

RULES = (
    "nonfinite",
    "dead_relu",
    "saturated_activation",
    "poor_weight_initialization",
    "all_zero",
    "low_precision_range",
    "scaler_skips",
    "replica_divergence",
)


@cache
def found(program: str, fault: str | None) -> tuple[IssueFiring, ...]:
    specs = tuple(spec for rule in RULES for spec in only(rule))
    issues = issues_of(recorded(program, fault), specs=specs)
    return tuple(issue for issue in issues if issue.state == "firing")


@pytest.mark.parametrize(
    ("program", "fault", "rule", "branch", "by_step"),
    [
        ("mlp", "nan_in_a_batch", "nonfinite", "input", 60),
        ("mlp", "nan_in_a_weight", "nonfinite", "weight", 61),
        ("cnn", "nan_in_a_gradient", "nonfinite", "gradient", 60),
        ("mlp", "bad_init", "poor_weight_initialization", "variance_ratio", 1),
        ("mlp", "weights_of_zero", "poor_weight_initialization", "narrow_gradients", 10),
        ("regression", "batch_that_changes_nothing", "poor_weight_initialization", "flat_loss", 10),
        ("regression", "saturated_tanh", "saturated_activation", "hidden", 1),
        ("mlp", "cleared_before_the_step", "all_zero", "gradients", 2),
        ("mlp", "half_precision_gradients", "low_precision_range", "underflow", 20),
        ("mlp", "loss_too_large_for_half", "scaler_skips", "floor", 1),
        ("mlp", "dead_relu", "dead_relu", "", 1),
    ],
)
def test_each_fault_is_found_in_time(
    program: str, fault: str, rule: str, branch: str, by_step: int
) -> None:
    issue = next(i for i in found(program, fault) if (i.rule, i.branch) == (rule, branch))
    assert issue.step is not None
    assert issue.step <= by_step


@pytest.mark.parametrize("program", ["mlp", "cnn", "regression"])
def test_the_same_programs_without_a_fault_are_quiet(program: str) -> None:
    assert found(program, None) == ()


def trained_replicas(spoil: Callable[[nn.Module], None] | None) -> RunBuilder:
    """Three replicas on data of their own, whose gradients are averaged; one is spoilt."""
    torch.manual_seed(0)
    replicas = [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) for _ in range(3)]
    for other in replicas[1:]:
        other.load_state_dict(replicas[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters()) for model in replicas]
    data = [batches(*digits(), batch=16, seed=rank) for rank in range(3)]
    run = RunBuilder(world_size=3)
    for step in range(60):
        for model, source in zip(replicas, data, strict=True):
            images, labels = next(source)
            model.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
        for same in zip(*(model.parameters() for model in replicas), strict=True):
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        if spoil is not None and step == 35:
            spoil(replicas[2])
        if step % 20 == 0:
            for rank, model in enumerate(replicas):
                (table,) = Checksums(list(model.named_parameters())).tables()
                frame = table.frame(run.origin(rank), step, every=20, at_us=0)
                run.add(frame, rank=rank)
    return run


@pytest.mark.slow
def test_a_flipped_bit_in_one_replica_is_found() -> None:
    def flip(model: nn.Module) -> None:
        bits = next(model.parameters()).detach().view(torch.int32)
        bits[0, 0] ^= 1

    run = trained_replicas(flip)
    issue = assert_fires(run.records, "replica_divergence", specs=only("replica_divergence"))
    assert (issue.branch, issue.first_rank, issue.first_step) == ("diverged", 2, 40)


def test_averaged_replicas_stay_alike() -> None:
    run = trained_replicas(None)
    assert issues_of(run.records, specs=only("replica_divergence")) == []
