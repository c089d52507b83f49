"""Stops at breakpoint() after step 4, and pdb reads its commands from stdin.

Feed it `p step` and `continue`, through a pipe or a terminal; it then trains on to step 9.
"""

import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    loss = model(torch.ones(16, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 4:
        breakpoint()
print("trained 10 steps after the debugger", flush=True)
