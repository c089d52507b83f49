"""torchrun: two processes train one network with DistributedDataParallel, on CPUs with gloo.

    cd examples/torchrun
    tocsin run -- torchrun --nproc-per-node 2 train.py
    tocsin run -- torchrun --nproc-per-node 2 train.py --learning-rate 1e6    # goes bad, is stopped

One launcher per node watches all ranks that are started there. Knows nothing of tocsin.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64


def main() -> None:
    """Fit a small network to a wave; each rank draws its own points."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    arguments = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    points = torch.Generator().manual_seed(rank)
    for step in range(arguments.steps):
        x = 6 * torch.rand(BATCH, 1, generator=points) - 3
        loss = nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} on {world} ranks", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
