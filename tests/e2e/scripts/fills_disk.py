"""Saves 1 MB after each step until the disk of the working folder is full, then trains on.

It goes on for `--seconds` more, as a training does that only warns of a failed save.
"""

import argparse
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=7.0)
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
full_at = None
step = 0
while full_at is None or time.monotonic() < full_at + arguments.seconds:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    if full_at is None:
        try:
            with open(f"saved-{step}", "wb") as file:
                file.write(bytes(1 << 20))
        except OSError as error:
            print(f"step {step}: {error}", flush=True)
            full_at = time.monotonic()
    step += 1
