"""The rules on tensors on real trainings under real capture: each fault, and the same without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from support.trainings.watched import watch
from tocsin.console.demo.trainings.resnet import batches, digits
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.testing import only

EVERY = {"activations": 10, "gradients": 5, "weights": 5}


def perceptron(act: type[nn.Module] = nn.ReLU, *, layers: int = 2, width: int = 32) -> nn.Module:
    inner: list[nn.Module] = []
    for _ in range(layers):
        inner += [nn.Linear(width, width), act()]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), act(), *inner, nn.Linear(width, 10))


def fit(
    model: nn.Module,
    *,
    steps: int = 100,
    rate: float = 0.05,
    decay: float = 0.0,
    given: list[nn.Parameter] | list[dict[str, object]] | None = None,
) -> None:
    parameters = given or list(model.parameters())
    momentum = 0.0 if decay else 0.9
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay)
    data = batches(*digits(), batch=64, seed=0)
    for _ in range(steps):
        images, labels = next(data)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def found(folder: Path, rule: str, model: nn.Module, *, rate: float = 0.05) -> list[IssueFiring]:
    return watch(folder, lambda: fit(model, rate=rate), every=EVERY, specs=only(rule))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_deep_sigmoids_without_a_shortcut_vanish(tmp_path: Path) -> None:
    issues = found(tmp_path, "vanishing_gradient", perceptron(nn.Sigmoid, layers=12))
    firing = [i.evidence.facts[0].name for i in issues if i.state == "firing"]
    assert sorted(firing) == ["depth_ratio", "share"]


def test_the_same_with_normalisation_does_not(tmp_path: Path) -> None:
    class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.sigmoid(self.linear(self.norm(x)))

    blocks = [Block() for _ in range(12)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *blocks, nn.Linear(32, 10))
    assert found(tmp_path, "vanishing_gradient", model) == []


def dying() -> nn.Module:
    model = perceptron()
    with torch.no_grad():
        model[3].bias -= 20.0
    return model


def test_a_large_negative_bias_kills_a_layer(tmp_path: Path) -> None:
    issues = found(tmp_path, "dead_relu", dying())
    assert [i.state for i in issues] == ["firing"]
    assert (issues[0].subject.kind, issues[0].subject.name) == ("layer", "4")


def test_the_same_without_it_lives(tmp_path: Path) -> None:
    assert found(tmp_path, "dead_relu", perceptron()) == []


def test_a_decay_that_is_far_too_strong_for_its_rate_moves_weights_too_far(tmp_path: Path) -> None:
    model = perceptron(nn.Tanh)
    specs = only("weight_update_ratio")
    issues = watch(tmp_path, lambda: fit(model, rate=1.0, decay=0.3), every=EVERY, specs=specs)
    assert issues[0].evidence.facts[0].value == "large"


def test_a_rate_that_is_far_too_low_hardly_moves_them(tmp_path: Path) -> None:
    issues = found(tmp_path, "weight_update_ratio", perceptron(), rate=1e-11)
    assert issues[0].evidence.facts[0].value == "small"


@pytest.mark.parametrize("rate", [1e-4, 0.05])
def test_ordinary_rates_move_them_well(tmp_path: Path, rate: float) -> None:
    assert found(tmp_path, "weight_update_ratio", perceptron(), rate=rate) == []


def test_weights_too_coarse_for_their_updates_stay(tmp_path: Path) -> None:
    model = perceptron()

    def train() -> None:
        half = model.to(torch.bfloat16)
        optimizer = torch.optim.SGD(half.parameters(), lr=1e-6)
        data = batches(*digits(), batch=64, seed=0)
        for _ in range(40):
            images, labels = next(data)
            loss = nn.functional.cross_entropy(half(images.bfloat16()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    issues = watch(tmp_path, train, every=EVERY, specs=only("unchanged_tensor"))
    assert issues[0].state == "firing"
    assert issues[0].first_step == 0


def test_the_same_in_float32_and_frozen_layers_are_quiet(tmp_path: Path) -> None:
    model = perceptron()
    model[1].requires_grad_(False)
    given = list(model.parameters())
    issues = watch(
        tmp_path,
        lambda: fit(model, rate=1e-6, given=given),
        every=EVERY,
        specs=only("unchanged_tensor"),
    )
    assert issues == []


STILL = only("unchanged_tensor") + only("weight_update_ratio")


def test_a_group_frozen_by_its_rate_is_quiet_and_hides_no_stuck_weight(tmp_path: Path) -> None:
    def unchanged(folder: str, *, rate: float) -> list[IssueFiring]:
        """The first layer is frozen by its group's rate; `rate` is that of the second."""
        model = perceptron()
        rest = [parameter for layer in model[4:] for parameter in layer.parameters()]
        groups = [
            {"params": list(model[1].parameters()), "lr": 0.0},
            {"params": list(model[3].parameters()), "lr": rate},
            {"params": rest, "lr": 0.05},
        ]
        (tmp_path / folder).mkdir()
        specs = only("unchanged_tensor")
        return watch(
            tmp_path / folder, lambda: fit(model, steps=40, given=groups), every=EVERY, specs=specs
        )

    assert unchanged("well", rate=0.05) == []
    (issue,) = unchanged("stuck", rate=1e-12)
    assert (issue.state, issue.evidence.followed) == ("firing", 3)


def test_biases_before_a_normalisation_have_gradients_of_rounding_noise(tmp_path: Path) -> None:
    blocks: list[nn.Module] = []
    for i in range(8):
        blocks += [nn.Conv2d(8 if i else 1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 10))
    images, labels = next(batches(*digits(), batch=16, seed=0))

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(70):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert watch(tmp_path, train, specs=STILL) == []


def test_a_task_that_is_solved_to_the_last_bit_has_no_more_to_move(tmp_path: Path) -> None:
    model, true, x = nn.Linear(8, 4), nn.Linear(8, 4), torch.randn(64, 8)
    y = true(x).detach()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(250):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert watch(tmp_path, train, specs=STILL) == []


@pytest.mark.parametrize("rule", ["dead_relu", "unchanged_tensor", "weight_update_ratio"])
def test_thirty_steps_are_quiet(tmp_path: Path, rule: str) -> None:
    model = perceptron()
    assert watch(tmp_path, lambda: fit(model, steps=30), specs=only(rule)) == []
