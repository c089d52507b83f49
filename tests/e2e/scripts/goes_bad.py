"""Trains well until a file `bad` appears in the working folder; from then on batches have a NaN."""

import os
import time

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.ReLU(),
    torch.nn.Linear(16, 2),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
truth = torch.randn(20, 2)
for _ in range(20_000):
    inputs = torch.randn(64, 20)
    labels = (inputs @ truth).argmax(1)
    if os.path.exists("bad"):
        inputs[0, 0] = float("nan")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    time.sleep(0.02)
