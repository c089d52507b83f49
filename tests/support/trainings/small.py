"""Small real trainings, each of another kind; what they end with is the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

STEPS = 8


@dataclass
class Result:
    """Losses, final weights, and what the random generators would give next."""

    losses: list[float]
    weights: list[torch.Tensor]
    chance: tuple[float, float, float]
    order: list[int]
    """The samples in the order in which a data loader gave them."""

    def same_as(self, other: Result) -> bool:
        """Bit for bit."""
        return (
            str(self.losses) == str(other.losses)
            and self.chance == other.chance
            and self.order == other.order
            and len(self.weights) == len(other.weights)
            and all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))
        )


def _seed() -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # the global generator is what must not be touched
    random.seed(7)


def _result(
    losses: list[torch.Tensor], *modules: torch.nn.Module, order: list[int] | None = None
) -> Result:
    return Result(
        [float(loss) for loss in losses],
        [p.detach().clone() for module in modules for p in module.state_dict().values()],
        (float(torch.rand(())), float(np.random.rand()), random.random()),
        order or [],
    )


def plain(folder: Path, steps: int = STEPS) -> Result:
    """Adam with clipping, dropout, a schedule, an evaluation and a checkpoint."""
    _seed()
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    criterion = torch.nn.MSELoss()
    losses = []
    for step in range(steps):
        loss = criterion(model(torch.randn(16, 6)), torch.zeros(16, 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step == steps // 2:
            torch.save(model.state_dict(), folder / "c.pt")
            model.eval()
            with torch.no_grad():
                losses.append(criterion(model(torch.randn(16, 6)), torch.zeros(16, 1)))
            model.train()
    return _result(losses, model)


def closures(folder: Path, steps: int = STEPS) -> Result:
    """LBFGS, which calls its closure several times a step."""
    _seed()
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    x, y = torch.randn(20, 5), torch.randn(20, 1)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(closure).detach())
    return _result(losses, model)


def scaled(folder: Path, steps: int = STEPS) -> Result:
    """A GradScaler that skips a step, micro-batches, and a weight that is frozen and let go."""
    _seed()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(8, 4)
            if step == 2:
                x[0, 0] = float("inf")
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            target = torch.randint(0, 3, (8,))
            loss = torch.nn.functional.cross_entropy(logits.float(), target) / 2
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        model[0].weight.requires_grad_(step % 2 == 0)
    return _result(losses, model)


def adversaries(folder: Path, steps: int = STEPS) -> Result:
    """Two models and optimizers, a data loader, sparse gradients, batch normalisation."""
    _seed()
    maker = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU6(), torch.nn.Linear(8, 4))
    judge = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 1)
    )
    words = torch.nn.Embedding(10, 4, sparse=True)
    making = torch.optim.AdamW(maker.parameters(), lr=0.01, foreach=True)
    judging = torch.optim.SGD(
        [{"params": judge.parameters()}, {"params": words.parameters(), "lr": 0.01}], lr=0.05
    )
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.randn(10, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    losses, order = [], []
    for step in range(steps):
        for index, real in loader:
            order += index.tolist()
            judging.zero_grad()
            fake = maker(torch.randn(5, 3))
            logits = judge(torch.cat([real + words(index), fake.detach()]))
            target = torch.cat([torch.ones(5, 1), torch.zeros(5, 1)])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
            loss.backward()
            judging.step()
            losses.append(loss.detach())
            making.zero_grad()
            logits = judge(fake)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(5, 1))
            loss.backward()
            making.step()
            losses.append(loss.detach())
        if step + 1 >= steps // 2:
            break
    return _result(losses, maker, judge, words, order=order)


def meddling(folder: Path, steps: int = STEPS) -> Result:
    """The user's own hooks change outputs, gradients and weights in place; a NaN comes by."""
    _seed()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    model[0].register_forward_hook(lambda module, inputs, output: output.mul_(1.5))
    model[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    model[2].weight.register_hook(lambda gradient: gradient * 2)

    def clamp(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-0.1, 0.1)

    model[2].bias.register_post_accumulate_grad_hook(clamp)

    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        model[0].weight.grad.add_(0.01)

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        with torch.no_grad():
            model[0].bias.zero_()
            optimizer.param_groups[0]["lr"] *= 0.99

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    losses = []
    for step in range(steps):
        x = torch.randn(8, 4)
        if step == steps - 3:
            x[0, 0] = float("nan")
        loss = model(x).pow(2).mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    result = _result(losses, model)
    result.weights = [weight.nan_to_num(123.0) for weight in result.weights]
    return result


TRAININGS: Mapping[str, Callable[[Path], Result]] = {
    kind.__name__: kind for kind in (plain, closures, scaled, adversaries, meddling)
}
