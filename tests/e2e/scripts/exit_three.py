"""Trains ten steps, then leaves with sys.exit(3): that code must come out unchanged."""

import sys

import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    loss = model(torch.ones(16, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained 10 steps, leaving with 3", flush=True)
sys.exit(3)
