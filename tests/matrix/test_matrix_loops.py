"""PyTorch as it is used today, in loops of one process: each row of the list is a test.

Each training runs twice, without capture and with it, and must end bit for bit the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.trainings.matrix import Row, Trained, watch
from tocsin.emitter.probes.local_gradients import LocalGradients

STEPS = 6


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch() -> torch.Tensor:
    return torch.randn(8, 6)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[nn.Module], object] = id
) -> float:
    loss: torch.Tensor = model(batch()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    clip(model)
    optimizer.step()
    return float(loss.detach())


def loop(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = STEPS) -> Trained:
    model = network()
    optimizer = make(model)
    return Trained.of([step(model, optimizer) for _ in range(steps)], model)


def assert_each_step_seen(row: Row, steps: int = STEPS) -> None:
    assert sorted(row.train) == list(range(steps))
    assert row.series("loss") == pytest.approx(row.trained.losses[-steps:], rel=1e-6)
    assert len(row.series("gradient_norm")) == steps
    assert set(row.series("gradient_nonfinite")) == {0.0}
    assert row.found() == []


def test_a_plain_loop(tmp_path: Path) -> None:
    row = watch(tmp_path, lambda: loop(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)))
    assert_each_step_seen(row)
    assert row.series("lr.0") == pytest.approx([0.1] * STEPS)
    assert row.said.frame("gradients", 3).rows == ("2.bias", "2.weight", "0.bias", "0.weight")
    assert row.said.frame("weights", 5).rows == ("0.weight", "0.bias", "2.weight", "2.bias")


# -- precision


def test_autocast_in_bfloat16(tmp_path: Path) -> None:
    def train() -> Trained:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Trained.of(losses, model)

    assert_each_step_seen(watch(tmp_path, train))


def test_a_model_in_bfloat16(tmp_path: Path) -> None:
    def train() -> Trained:
        model = network().to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(STEPS):
            loss = model(batch().to(torch.bfloat16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Trained.of(losses, model)

    assert_each_step_seen(watch(tmp_path, train))


SCALED: list[tuple[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer], bool]] = [
    ("plain", lambda p: torch.optim.SGD(p, lr=1e-4), False),
    ("unscaled and clipped", lambda p: torch.optim.SGD(p, lr=1e-4), True),
    ("fused", lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), False),
]


@pytest.mark.parametrize(("make", "unscale"), [s[1:] for s in SCALED], ids=[s[0] for s in SCALED])
def test_steps_that_a_grad_scaler_skips_are_counted_and_no_nan(
    tmp_path: Path,
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
    unscale: bool,
) -> None:
    skipped: list[int] = []

    def train() -> Trained:
        model = network()
        optimizer = make(model.parameters())
        # So large that gradients overflow until it has been halved some times; later it grows.
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**127, growth_interval=3, growth_factor=64.0
        )
        skipped.clear()
        losses, since = [], 0
        for _ in range(40):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = 1000 * model(batch()).float().square().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                since += 1
                continue
            losses.append(loss.item())
            skipped.append(since)
            since = 0
        return Trained.of(losses, model)

    row = watch(tmp_path, train)
    made = len(row.trained.losses)
    assert sum(skipped) > 10
    assert made > 3
    # That so many are skipped is told, and that such a loss throws the weights away.
    assert "nonfinite" not in {issue.rule for issue in row.issues}
    row = replace(row, issues=[])
    assert_each_step_seen(row, made)
    assert row.series("scaler_skipped") == pytest.approx(skipped[-made:])
    # The norm is that of gradients as they are, not as they were scaled.
    assert max(row.series("gradient_norm")) < 1e9


# -- several backward calls


def test_gradient_accumulation_says_sum_mean_and_how_many(tmp_path: Path) -> None:
    losses: list[list[float]] = []

    def train() -> Trained:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.clear()
        for _ in range(STEPS):
            losses.append([])
            for _ in range(4):
                loss = model(batch()).square().mean() / 4
                loss.backward()
                losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return Trained.of([sum(each) for each in losses], model)

    row = watch(tmp_path, train)
    assert_each_step_seen(row)
    assert row.series("loss_mean") == pytest.approx([sum(x) / 4 for x in losses], rel=1e-6)
    assert row.series("micro_batches") == [4.0] * STEPS


@pytest.mark.parametrize("way", ["norm", "value"])
def test_clipping(tmp_path: Path, way: str) -> None:
    norms: list[float] = []

    def clip(model: nn.Module) -> None:
        squares = [float(p.grad.double().square().sum()) for p in model.parameters()]
        norms.append(math.sqrt(sum(squares)))
        if way == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    def train() -> Trained:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms.clear()
        return Trained.of([step(model, optimizer, clip) for _ in range(STEPS)], model)

    row = watch(tmp_path, train)
    assert_each_step_seen(row)
    if way == "norm":
        assert row.series("gradient_norm") == pytest.approx(norms, rel=1e-4)
        assert row.series("gradient_norm_clipped") == pytest.approx([0.01] * STEPS, rel=1e-3)
    else:
        assert max(row.series("gradient_norm")) < min(norms)


# LBFGS of torch 2.8 does that itself.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_calls_its_closure_often_and_makes_one_step(
    tmp_path: Path, search: str | None
) -> None:
    def train() -> Trained:
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
        losses = []
        for _ in range(STEPS):
            x = batch()

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean()
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        return Trained.of(losses, model)

    row = watch(tmp_path, train)
    assert_each_step_seen(row)
    assert "micro_batches" not in row.train[0]


# -- optimizers


OPTIMIZERS: list[tuple[str, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    ("fused SGD", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True)),
    ("fused AdamW", lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)),
    ("foreach Adam", lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True)),
    ("foreach SGD", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True)),
    ("Adafactor-like", lambda m: torch.optim.Adadelta(m.parameters())),
]


@pytest.mark.parametrize("make", [o[1] for o in OPTIMIZERS], ids=[o[0] for o in OPTIMIZERS])
def test_fused_and_foreach_optimizers(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    assert_each_step_seen(watch(tmp_path, lambda: loop(make)))


class Signs(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no types here
    """A custom optimizer as people write them: no base class but Optimizer."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
        return loss


class Lookahead(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer around another: its step makes the other's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {"lr": 0.0})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss: torch.Tensor | None = self.inner.step(closure)
        with torch.no_grad():
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


def test_a_custom_optimizer(tmp_path: Path) -> None:
    row = watch(tmp_path, lambda: loop(lambda m: Signs(m.parameters(), lr=0.01)))
    assert_each_step_seen(row)
    assert row.series("lr.0") == pytest.approx([0.01] * STEPS)


def test_an_optimizer_around_another_makes_one_step(tmp_path: Path) -> None:
    row = watch(
        tmp_path, lambda: loop(lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1)))
    )
    assert_each_step_seen(row)


def test_a_custom_optimizer_with_a_closure(tmp_path: Path) -> None:
    def train() -> Trained:
        model = network()
        optimizer = Signs(model.parameters(), lr=0.01)
        losses = []
        for _ in range(STEPS):
            x = batch()

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss is not None
            losses.append(loss.item())
        return Trained.of(losses, model)

    assert_each_step_seen(watch(tmp_path, train))


class Critic(nn.Sequential):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 1))


def test_two_networks_of_a_gan_keep_their_series_apart(tmp_path: Path) -> None:
    critics: list[float] = []

    def train() -> Trained:
        generator, critic = nn.Linear(6, 6), Critic()
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.02)
        criterion = nn.BCEWithLogitsLoss()
        critics.clear()
        losses = []
        for _ in range(STEPS):
            real, made = batch(), generator(batch())
            loss = criterion(critic(real), torch.ones(8, 1))
            loss = loss + criterion(critic(made.detach()), torch.zeros(8, 1))
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            critics.append(loss.item())
            of_generator.zero_grad()
            loss = criterion(critic(made), torch.ones(8, 1))
            loss.backward()
            of_generator.step()
            losses.append(loss.item())
        return Trained.of(losses, generator, critic)

    row = watch(tmp_path, train)
    assert_each_step_seen(row)
    assert row.series("lr.0") == pytest.approx([0.01] * STEPS)
    assert row.series("loss.critic") == pytest.approx(critics, rel=1e-6)
    assert row.series("lr.critic") == pytest.approx([0.02] * STEPS)
    assert len(row.series("gradient_norm.critic")) == STEPS
    rows = row.said.frame("gradients", 2).rows
    assert len(rows) == len(set(rows)) == 4


def test_one_optimizer_over_two_models(tmp_path: Path) -> None:
    def train() -> Trained:
        one, other = nn.Linear(6, 4), nn.Linear(4, 2)
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        losses = []
        for _ in range(STEPS):
            loss = other(one(batch()).relu()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Trained.of(losses, one, other)

    row = watch(tmp_path, train)
    assert_each_step_seen(row)
    rows = row.said.frame("gradients", 2).rows
    assert len(rows) == len(set(rows)) == 4


# -- parameters that come and go


def test_parameters_that_are_frozen_thawed_and_added_later(tmp_path: Path) -> None:
    def train() -> Trained:
        model = network()
        head = nn.Linear(3, 2)
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )
        losses = []
        whole = nn.Sequential(model)
        for each in range(9):
            if each == 3:
                whole.append(head)
                optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.05})
            if each == 5:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            if each == 7:
                model[2].requires_grad_(False)
            losses.append(step(whole, optimizer))
        return Trained.of(losses, model, head)

    row = watch(tmp_path, train)
    assert_each_step_seen(row, 9)
    sizes = [len(row.said.frame("gradients", each).rows) for each in range(9)]
    assert sizes == [2, 2, 2, 4, 4, 6, 6, 4, 4]
    assert "lr.2" not in row.train[4]
    assert row.train[5]["lr.2"] == pytest.approx(0.01)


def test_a_frozen_parameter_in_the_optimizer_is_left_out(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        next(model.parameters()).requires_grad_(False)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    row = watch(tmp_path, lambda: loop(make))
    assert_each_step_seen(row)
    assert "0.weight" not in row.said.frame("gradients", 2).rows
    assert "0.weight" in row.said.frame("weights", 5).rows


# -- memory and graphs


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    def train() -> Trained:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(STEPS):
            x = batch().requires_grad_()
            loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Trained.of(losses, model)

    row = watch(tmp_path, train)
    assert_each_step_seen(row)
    # The backward call inside of the backward call is none of a micro-batch.
    assert "micro_batches" not in row.train[0]


def test_capture_steps_aside_while_a_cuda_graph_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ops that run while a graph is recorded are those of the training alone.

    Reading a number from a tensor on the CPU is no work of a GPU.
    """
    ran: list[list[str]] = []

    class Ops(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: object, types: object, args: tuple[object, ...], kwargs: object = None
        ) -> object:
            assert callable(function)
            if "_local_scalar_dense" not in str(function):
                ran[-1].append(str(function))
            return function(*args, **(kwargs if isinstance(kwargs, dict) else {}))

    def train() -> Trained:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [step(model, optimizer) for _ in range(2)]
        ran.append([])
        with monkeypatch.context() as patch, Ops():
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            losses.append(step(model, optimizer))
        losses += [step(model, optimizer) for _ in range(3)]
        return Trained.of(losses, model)

    row = watch(tmp_path, train)
    assert ran[0] == ran[1]
    assert [f.step for f in row.said.frames if f.collection == "gradients"][:2] == [0, 1]
    assert row.train[5]["loss"] == pytest.approx(row.trained.losses[-1], rel=1e-6)


def test_a_rank_s_own_gradients_are_left_alone_while_a_cuda_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = LocalGradients()
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.full((4,), math.nan, dtype=torch.bfloat16)
    local.is_new(weight)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        local.read(weight)
    assert local.drain({id(weight): "weight"}) is None
    local.read(weight)
    assert local.drain({id(weight): "weight"}) is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is there")
def test_a_recorded_cuda_graph_replays_and_is_seen(tmp_path: Path) -> None:
    def train() -> Trained:
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(8, 6, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                model(x).square().mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        losses = []
        for _ in range(5):
            graph.replay()
            losses.append(loss.item())
        return Trained.of(losses, model)

    row = watch(tmp_path, train)
    assert set(row.train) >= {0, 1, 2}
    assert row.trained.losses[-1] < row.trained.losses[0]
