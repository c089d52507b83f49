"""A training on several gloo ranks, started by torchrun; trains until it is stopped.

`--alone N` has each rank train by itself (no DDP), rank 0 with a pause of N milliseconds in each
step, so that the ranks do not step together. `--nan-at K` puts NaN into the batch of rank 1 at that
step.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--pause-ms", type=float, default=2.0)
parser.add_argument("--alone", type=float)
parser.add_argument("--keep-group", action="store_true", help="do not destroy it at the end")
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model: torch.nn.Module = torch.nn.Linear(8, 4)
if arguments.alone is None:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
pause_s = arguments.pause_ms / 1000
if arguments.alone is not None and rank == 0:
    pause_s = arguments.alone / 1000
print(f"begin rank {rank} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
for step in range(arguments.steps):
    batch = torch.ones(4, 8) * (rank + 1)
    if rank == 1 and step == arguments.nan_at:
        batch[0, 0] = float("nan")
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"rank {rank} step {step}", flush=True)
    time.sleep(pause_s)
if not arguments.keep_group:
    dist.destroy_process_group()
print(f"end rank {rank}", flush=True)
