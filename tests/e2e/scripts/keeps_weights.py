"""Trains until a stop, and prints whether the weights are finite then. A gradient is NaN at 25."""

import time

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
try:
    while True:
        out = model(torch.ones(4, 8))
        if step == 25:
            out = out + (out - out).sqrt()
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        step += 1
        time.sleep(0.01)
finally:
    finite = bool(torch.isfinite(torch.nn.utils.parameters_to_vector(model.parameters())).all())
    print(f"{step} steps, weights finite: {finite}")
