"""Trainings on two gloo ranks, in some of which one rank is slowed.

python -m support.ranks.slowed FOLDER [--steps N]

`FOLDER/SCENARIO/bus.db` is what was captured of each. torch is imported once, then two ranks are
forked.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from support.trainings.captured import captured

SLOW = 1
"""The rank that is slowed."""

PAUSE_S = 0.02


class Samples(TensorDataset):  # type: ignore[misc]  # torch has no types here
    """Each batch of 16 takes a while."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(torch.randn(1024, 64))
        self.pause_s = pause_s

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if self.pause_s:
            time.sleep(self.pause_s / 16)
        return (self.tensors[0][index],)


class Net(nn.Module):  # type: ignore[misc]
    """With buffers, which rank 0 sends to the others before each forward pass."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8)
        )
        self.pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Slowly, where it is slow."""
        if self.pause_s:
            time.sleep(self.pause_s)
        return self.layers(x)


def train(rank: int, steps: int, *, data: bool = False, compute: bool = False, slow: int) -> None:
    """DDP; the slow rank waits for its data, or in its forward pass."""
    pause_s = PAUSE_S if rank == slow else 0.0
    model = DistributedDataParallel(Net(pause_s if compute else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(pause_s if data else 0.0), batch_size=16)
    done = 0
    while done < steps:
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            done += 1
            if done == steps:
                break


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    "even": functools.partial(train, slow=-1),
    "data": functools.partial(train, data=True, slow=SLOW),
    "data_of_rank_0": functools.partial(train, data=True, slow=0),
    "compute": functools.partial(train, compute=True, slow=SLOW),
}


def run_rank(rank: int, port: int, folder: Path, steps: int) -> None:
    """All scenarios on one rank."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2"
    )
    os.environ["TOCSIN_RUN_ID"] = "r1"
    dist.init_process_group("gloo")
    for name, scenario in SCENARIOS.items():
        with captured(folder / name):
            scenario(rank, steps)
        dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Fork both ranks; 0 if both have come through."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    for name in SCENARIOS:
        (arguments.folder / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, port, arguments.folder, arguments.steps))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
