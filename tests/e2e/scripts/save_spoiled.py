"""Trains a small model and saves it: once as it is, once with a NaN, once cut off."""

import os
import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    if step == 1:
        torch.save(model.state_dict(), folder / "good-1.pt")
    elif step == 3:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["weight"][0, 0] = float("nan")
        torch.save(state, folder / "bad-3.pt")
    elif step == 4:
        torch.save(model.state_dict(), folder / "torn-4.pt")
        os.truncate(folder / "torn-4.pt", 700)
torch.save(model.state_dict(), folder / "last-5.pt")
