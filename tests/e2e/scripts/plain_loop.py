"""The plainest user script: a tiny perceptron, about 50 quick steps, its own prints.

`--nan-at K` puts NaN into the input of step K, so the loss and all gradients are NaN from there.
Run with and without tocsin: stdout, exit code and weights must be the same.
"""

import argparse
import hashlib

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(256, 8)
targets = inputs.sum(dim=1, keepdim=True)
for step in range(arguments.steps):
    batch = inputs * float("nan") if step == arguments.nan_at else inputs
    loss = torch.nn.functional.mse_loss(model(batch), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights sha256", hashlib.sha256(weights).hexdigest())
