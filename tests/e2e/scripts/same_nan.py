"""Deterministic NaN in the gradient of `0.weight` at step `--nan-at`; trains on to step 2,000.

Started again with the same `--run-id` it hits the same NaN again, which must be a new issue of a
new incarnation. A step takes `--pause` seconds and a few milliseconds, so a stop comes long before
the last one.
"""

import argparse
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--nan-at", type=int, default=20, metavar="K")
parser.add_argument("--pause", type=float, default=0.005, metavar="SECONDS")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
for step in range(2_000):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    if step == arguments.nan_at:
        model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    time.sleep(arguments.pause)
print("done after 2000 steps: nobody stopped it", flush=True)
