"""A DataLoader with two forked worker processes, for two epochs of ten batches.

The workers must not send records of their own, and none may outlive the script. Prints their pids.
"""

import os

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):  # type: ignore[misc]  # torch has no types here
    """Numbers and their squares; each sample says which process made it."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.tensor([index / 160])
        return x, x * x, os.getpid()


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(Squares(), batch_size=16, num_workers=2, multiprocessing_context="fork")
pids: set[int] = set()
steps = 0
for _ in range(2):
    for x, y, made_by in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        pids.update(made_by.tolist())
print(f"trained {steps} steps", flush=True)
print("worker pids", *sorted(pids), flush=True)
