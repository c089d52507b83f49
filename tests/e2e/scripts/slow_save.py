"""Trains, and at step 3 saves for three seconds; it says so in the file `saving` before it."""

import sys
import time
from pathlib import Path

import torch

folder = Path(sys.argv[1])


class Slow:
    """Takes three seconds to pickle."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        (folder / "saving").touch()
        time.sleep(3)
        return int, (1,)


model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1_000_000):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    if step == 3:
        torch.save({"model": model.state_dict(), "slow": Slow()}, folder / "step-3.pt")
