"""Frozen weights that were never trained: which trainings are told of, and which are not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.trainings.captured import captured, said
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.watch import activations
from tocsin.schemas.records.frames import TensorFrame

STEPS = 10
Training = Callable[[], None]
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A backbone and a head."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x).flatten(1))


def perceptron(width: int = 48) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(8, width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def filters() -> nn.Sequential:
    """As torchvision initialises a ResNet."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 2, 4))]
    for into, out in ((1, 32), (32, 32), (32, 32), (32, 32)):
        layers += [
            nn.Conv2d(into, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
    layers.append(nn.AdaptiveAvgPool2d(1))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(*layers)


def transformer() -> nn.Module:
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Unflatten(1, (1, 32)), nn.TransformerEncoder(block, 2)
    )


def classify(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(net(x), y)


def fit(
    net: nn.Module,
    *,
    steps: int = STEPS,
    step: Step = classify,
    after: Callable[[], None] = lambda: None,
    everything: bool = False,
) -> None:
    chosen = [p for p in net.parameters() if everything or p.requires_grad]
    optimizer = torch.optim.Adam(chosen, 1e-3)
    for _ in range(steps):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        step(net, x, (x[:, 0] > 0).long()).backward()
        optimizer.step()
        after()


@pytest.fixture
def untrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Training], list[TensorFrame]]]:
    def watch(training: Training) -> list[TensorFrame]:
        torch.manual_seed(0)
        with captured(tmp_path) as hooks:
            training()
            assert hooks.isolation.off == {}
        return [frame for frame in said(tmp_path).frames if frame.collection == "untrained"]

    # Another test of this process may have compiled a model: from then on calls are left alone.
    monkeypatch.setattr(activations.patches, "for_good", False)
    monkeypatch.setattr(slots, "compiling", False)
    if "__call__" in nn.Linear.__dict__:
        monkeypatch.delattr(nn.Linear, "__call__")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield watch
    torch.set_num_threads(threads)


Watch = Callable[[Training], list[TensorFrame]]


@pytest.mark.parametrize(
    ("backbone", "width", "tensors", "normal"),
    [
        pytest.param(perceptron, 48, 4, False, id="uniform"),
        pytest.param(filters, 32, 4, True, id="normal, with untouched scales"),
        pytest.param(transformer, 32, 5, False, id="attention"),
    ],
)
@pytest.mark.parametrize("everything", [False, True], ids=["head alone", "all in the optimizer"])
def test_a_fresh_backbone_that_is_frozen(
    untrained: Watch,
    backbone: Callable[[], nn.Module],
    width: int,
    tensors: int,
    normal: bool,
    everything: bool,
) -> None:
    def training() -> None:
        net = Net(backbone(), width)
        net.backbone.requires_grad_(False)
        fit(net, everything=everything)

    (frame,) = untrained(training)
    assert frame.step in range(5, 10)
    assert len(frame.rows) == tensors
    assert frame.rows[0].startswith("backbone.")
    is_normal, matrices, frozen = (frame.count(n) for n in ("normal", "matrices", "frozen"))
    assert is_normal is not None
    assert matrices is not None
    assert frozen is not None
    assert set(is_normal.tolist()) == {int(normal)}
    assert (int(matrices[0]), int(frozen[0])) == (tensors + 1, tensors)


def test_a_backbone_under_no_grad(untrained: Watch) -> None:
    def step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert isinstance(net, Net)
        with torch.no_grad():
            features = net.backbone(x)
        return functional.cross_entropy(net.head(features), y)

    def training() -> None:
        net = Net(perceptron(), 48)
        net.backbone.requires_grad_(False)
        fit(net, step=step)

    assert len(untrained(training)) == 1


def pretrained(backbone: Callable[[], nn.Module], width: int) -> Training:
    def training() -> None:
        before = Net(backbone(), width)
        fit(before, steps=30)
        net = Net(copy.deepcopy(before.backbone), width)
        net.backbone.requires_grad_(False)
        fit(net)

    return training


def random_features() -> None:
    net = Net(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32)), 32)
    net.backbone.requires_grad_(False)
    fit(net)


class Tokens(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Frozen tables of tokens and places under layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, 16), nn.Embedding(8, 16)
        self.tokens.requires_grad_(False)
        self.places.requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 20).long().clamp(max=99)
        return self.layers((self.tokens(tokens) + self.places(torch.arange(8))).flatten(1))


def frozen_tables() -> None:
    fit(Tokens())


class Low(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer with a low-rank addition that trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(layer.in_features, 2) / 10)
        self.b = nn.Parameter(torch.zeros(2, layer.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result + x @ self.a @ self.b


def low_rank() -> None:
    layers = [Low(m) if isinstance(m, nn.Linear) else m for m in perceptron()]
    net = Net(nn.Sequential(*layers), 48)
    net.head.requires_grad_(False)
    fit(net)


class Twins(nn.Module):  # type: ignore[misc]  # torch has no types here
    """An online network, and a copy or a stranger of the same kind that is called before it."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.online = perceptron()
        self.other = copy.deepcopy(self.online) if same else perceptron()
        self.other.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.other(x + 0.01)
        return functional.mse_loss(self.online(x), target)


def twins(*, same: bool, follow: bool) -> Training:
    def training() -> None:
        net = Twins(same=same)

        def after() -> None:
            for old, new in zip(net.other.parameters(), net.online.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1) if not follow else old.data.copy_(new)

        fit(net, step=lambda net, x, y: net(x), after=after if same else lambda: None)

    return training


class Gan(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A generator and a critic in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(perceptron(), nn.Linear(48, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def toggled() -> None:
    net = Gan()
    critics = torch.optim.Adam(net.critic.parameters(), 1e-3)
    generators = torch.optim.Adam(net.generator.parameters(), 1e-3)
    for step in range(4 * STEPS):
        mine = step % 20 == 19  # the critic is trained long before the generator
        net.generator.requires_grad_(mine)
        net.critic.requires_grad_(not mine)
        optimizer = generators if mine else critics
        optimizer.zero_grad()
        fake, real = net.critic(net.generator(torch.randn(32, 8))), net.critic(torch.randn(32, 6))
        (fake.mean() if mine else functional.softplus(fake - real).mean()).backward()
        optimizer.step()


def scales_alone() -> None:
    net = Net(filters(), 32)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.requires_grad_(False)
    fit(net)


def plain_scales() -> None:
    layers: list[nn.Module] = []
    for into, out in ((8, 32), (32, 32), (32, 32)):
        layers += [nn.Linear(into, out), nn.BatchNorm1d(out, affine=False), nn.ReLU()]
    fit(Net(nn.Sequential(*layers), 32))


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(pretrained(perceptron, 48), id="pretrained"),
        pytest.param(pretrained(filters, 32), id="pretrained filters"),
        pytest.param(pretrained(transformer, 32), id="pretrained transformer"),
        random_features,
        frozen_tables,
        low_rank,
        pytest.param(twins(same=True, follow=False), id="momentum encoder"),
        pytest.param(twins(same=True, follow=True), id="copied encoder"),
        pytest.param(twins(same=False, follow=False), id="random network distillation"),
        toggled,
        scales_alone,
        plain_scales,
    ],
)
def test_what_is_frozen_on_purpose_is_not_told(untrained: Watch, training: Training) -> None:
    assert untrained(training) == []
