"""Loops that train something small: one optimizer or several, scaled, clipped, in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

Loop = Callable[[int], None]
"""Trains one step of that number."""


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def loop(*, clips: bool = False, batches: int = 1, scales: bool = False) -> Loop:
    model, inputs = linear(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for i in range(batches):
            loss = model(inputs * (i + 1)).pow(2).mean() / (number + 1)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clips and number != 20:  # one step in which nothing is clipped
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    return step


def adversaries() -> Loop:
    first, second = linear(), torch.nn.Linear(4, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]

    def step(number: int) -> None:
        for model, optimizer in zip((second, first), reversed(optimizers), strict=True):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).pow(2).mean() / (number + 1)).backward()
            optimizer.step()

    return step


def in_backward(layers: int = 4) -> Loop:
    model = torch.nn.Sequential(linear(), *(torch.nn.Linear(3, 3) for _ in range(layers - 1)))
    own = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda number: model(torch.ones(2, 4)).pow(2).mean().backward()


def checkpointed(losses: list[float]) -> Loop:
    """Each part of the loss is computed again inside of its backward call; `losses` gets the whole
    ones.
    """
    model, part = torch.nn.Linear(4, 3), linear()
    optimizer = torch.optim.SGD([*model.parameters(), *part.parameters()], lr=0.01)

    def criterion(hidden: torch.Tensor) -> torch.Tensor:
        return part.weight.mean() + hidden.pow(2).mean()

    def step(number: int) -> None:
        optimizer.zero_grad()
        chunks = model(torch.ones(6, 4) / (number + 1)).chunk(3)
        loss = torch.stack([checkpoint(criterion, c, use_reentrant=True) for c in chunks]).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()

    return step


def unseen() -> Loop:
    """Gradients that no backward call has made."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()

    return step
