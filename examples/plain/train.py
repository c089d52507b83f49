"""A plain PyTorch loop that knows nothing of tocsin.

cd examples/plain
tocsin run -- python train.py
tocsin run -- python train.py --learning-rate 1e6    # goes bad, and is stopped
"""

from __future__ import annotations

import argparse

import torch
from torch import nn


def main() -> None:
    """Fit a small network to a wave."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    y = torch.sin(x) + 0.05 * torch.randn_like(x)
    for step in range(arguments.steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
