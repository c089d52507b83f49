"""Raises an exception after step 9: the user's traceback and exit code 1 must come out unchanged.

The ten steps before it must have been recorded.
"""

import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    if step == 10:
        raise RuntimeError("the user's own mistake at step 10")
    loss = model(torch.ones(16, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
