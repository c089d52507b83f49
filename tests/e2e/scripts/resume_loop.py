"""Saves a checkpoint after every N-th step, goes on from the newest one, and tells its plan.

Of `--steps` in all; with a NaN at `--nan-at K`.
"""

import argparse
import time
from pathlib import Path

import torch

from tocsin.emitter import start

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("resumed"))
parser.add_argument("--every", type=int, default=20, metavar="N")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--nan-at", type=int, default=-1, metavar="K")
parser.add_argument("--pause", type=float, default=0.02, metavar="S")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
arguments.folder.mkdir(parents=True, exist_ok=True)
first = 0
if saved := sorted(arguments.folder.glob("step-*.pt")):
    state = torch.load(saved[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
run = start()
run.plan(arguments.steps, done_steps=first)
for step in range(first, arguments.steps):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    if step == arguments.nan_at:
        model.weight.grad[0, 0] = float("nan")
    optimizer.step()
    time.sleep(arguments.pause)
    print(f"step {step}", flush=True)
    if (step + 1) % arguments.every == 0:
        file = arguments.folder / f"step-{step:06d}.pt"
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
