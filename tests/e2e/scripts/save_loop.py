"""Saves a checkpoint with torch.save after every N-th step, into `--folder`; NaN at `--nan-at K`.

The message of an issue names the newest checkpoint written before the onset. With the defaults,
`step-9.pt`, `step-19.pt` and `step-29.pt` are written before the NaN of step 35.
"""

import argparse
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
parser.add_argument("--every", type=int, default=10, metavar="N")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--nan-at", type=int, default=35, metavar="K")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(256, 8)
targets = inputs.sum(dim=1, keepdim=True)
arguments.folder.mkdir(parents=True, exist_ok=True)
for step in range(arguments.steps):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    if step == arguments.nan_at:
        model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
    if (step + 1) % arguments.every == 0:
        file = arguments.folder / f"step-{step}.pt"
        torch.save({"step": step, "model": model.state_dict()}, file)
        print(f"saved {file}", flush=True)
