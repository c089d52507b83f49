"""The same without the launcher: `start()` watches this process, a notebook's for example.

python examples/in_python.py
"""

from __future__ import annotations

import torch
from torch import nn

from tocsin.emitter import start


def main() -> None:
    """Fit a small network to a wave, with scalars and a phase of our own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    y = torch.sin(x) + 0.05 * torch.randn_like(x)
    with start(labels={"team": "examples"}) as run:
        for step in range(400):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 99:
                with run.phase("evaluation"), torch.no_grad():
                    run.log({"error": (model(x) - y).abs().max().item()})


if __name__ == "__main__":
    main()
