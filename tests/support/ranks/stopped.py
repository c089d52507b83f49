"""Gloo ranks on this machine that are stopped, catch it, and train again: a stop in each round.

python -m support.ranks.stopped FOLDER RANKS ROUNDS [--sleeps RANK]

torch is imported once, then the ranks are forked. `FOLDER/pids` has a line for each rank, and
`FOLDER/steps` one for each step of rank 0: `ROUND STEP`. `--sleeps` has one rank sleep from step 20
on for an hour, so that it never comes to an exit point again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tocsin.emitter import StopTraining

SLEEPS_AT = 20
STEP_S = 0.01


def train(folder: Path, number: int, rank: int, ranks: int, sleeps: int | None) -> None:
    """One training, until it is stopped. Raises StopTraining."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/round-{number}", rank=rank, world_size=ranks
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = 0
    while True:
        if rank == sleeps and step == SLEEPS_AT:
            time.sleep(3600)
        loss = model(torch.ones(4, 8) * (rank + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            with (folder / "steps").open("a") as steps:
                print(number, step, file=steps)
        # Who reads the command runs beside as many ranks as spin.
        time.sleep(STEP_S)
        step += 1


def rank_main(folder: Path, rank: int, ranks: int, rounds: int, sleeps: int | None) -> None:
    """All trainings of one rank."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    for number in range(rounds):
        try:
            train(folder, number, rank, ranks, sleeps)
        except StopTraining:
            dist.destroy_process_group()


def main() -> int:
    """Fork the ranks and wait for them; 1 if one of them failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--sleeps", type=int)
    arguments = parser.parse_args()
    children = []
    for rank in range(arguments.ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                rank_main(
                    arguments.folder, rank, arguments.ranks, arguments.rounds, arguments.sleeps
                )
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    (arguments.folder / "pids").write_text("\n".join(map(str, children)))
    return int(any(os.waitpid(pid, 0)[1] for pid in children))


if __name__ == "__main__":
    sys.exit(main())
