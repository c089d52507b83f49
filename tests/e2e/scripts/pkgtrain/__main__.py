"""`python -m pkgtrain`: trains 20 steps and imports from its own package."""

import torch

from pkgtrain import STEPS

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    loss = model(torch.ones(16, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"pkgtrain done after {STEPS} steps", flush=True)
