"""A small perceptron learns handwritten digits on several processes, with gloo on the CPU.

torchrun --nproc-per-node 2 --max-restarts 2 -m tocsin.console.demo.trainings.ddp --steps 200
torchrun --nproc-per-node 2 -m tocsin.console.demo.trainings.ddp --fault nan_batch --fault-rank 1

Both faults are on one rank only and before the gradients are averaged; after that every rank has
the NaN, and training goes on without an error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tocsin.console.demo.trainings import common
from tocsin.console.demo.trainings.resnet import CLASSES, batches, digits

FAULTS = ("nan_batch", "nan_gradient")
# Hidden width, samples a step and rank.
SIZES = {"test": (512, 64), "bench": (2048, 128)}


def perceptron(width: int) -> nn.Module:
    """Return a network with two hidden layers: 16x16 images in, logits of the digits out."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16 * 16, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.training_parser(
        "Train a small perceptron on handwritten digits; start it with torchrun.",
        learning_rate=0.05,
        faults=FAULTS,
        sizes=tuple(SIZES),
    )
    parser.add_argument("--fault-rank", type=int, default=1, metavar="R", help="rank of the fault")
    parser.add_argument(
        "--fault-tensor", default="1.weight", metavar="NAME", help="for nan_gradient: a parameter"
    )
    return parser.parse_args(argv)


def _poisoned(gradient: torch.Tensor) -> torch.Tensor:
    bad = gradient.clone()
    bad[(0,) * bad.dim()] = float("nan")
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one of the ranks; return the exit code."""
    arguments = _arguments(argv)
    device = common.prepare(seed=arguments.seed, threads=arguments.threads, device=arguments.device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"rank {rank} of {world} pid {os.getpid()} restart {restart}", flush=True)
    width, batch = SIZES[arguments.size]
    model = perceptron(width).to(device)
    fault_parameter = common.parameter_named(model, arguments.fault_tensor)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=arguments.lr, momentum=0.9)
    # Each rank draws its own batches.
    data = batches(
        *digits(pixels=16), batch=arguments.batch or batch, seed=world * arguments.seed + rank
    )
    printer = common.Printer(every=arguments.print_every, times=arguments.times)
    step = 0
    try:
        for step in range(arguments.steps):
            bad_here = step == arguments.fault_at and rank == arguments.fault_rank
            fault = arguments.fault if bad_here else None
            images, labels = (part.to(device) for part in next(data))
            if fault == "nan_batch":
                images[0] = float("nan")
                printer.fault(fault, step, f"a corrupt image on rank {rank}")
            loss = functional.cross_entropy(parallel(images), labels)
            optimizer.zero_grad()
            if fault == "nan_gradient":
                handle = fault_parameter.register_hook(_poisoned)
                loss.backward()
                handle.remove()
                printer.fault(
                    fault, step, f"one NaN in {arguments.fault_tensor}'s gradient on rank {rank}"
                )
            else:
                loss.backward()
            optimizer.step()
            if rank == 0:
                printer.step(step, loss)
                if arguments.save_every and (step + 1) % arguments.save_every == 0:
                    common.save_checkpoint(
                        arguments.save_to, step=step, model=model, optimizer=optimizer
                    )
    finally:
        printer.left(step)
    torch.distributed.destroy_process_group()
    if rank == 0:
        common.finish(model, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
