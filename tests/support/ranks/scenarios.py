"""Trainings on two gloo ranks, one after the other in the same two processes.

python -m support.ranks.scenarios FOLDER

`FOLDER/SCENARIO/bus.db` is what was captured of each; `FOLDER/rank-N.json` what the rank itself
computed. torch is imported once, then two ranks are forked.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from support.trainings.captured import captured

STEPS = 4
BAD = 2
"""The step whose gradients are bad, where any are."""

BIG = 9000
"""More than a block: `big.weight` has that many columns."""

Numbers = dict[str, list[float]]


class Net(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Three layers; the one in the middle is used at every other step where `skips`."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big = nn.Linear(BIG, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.skips = skips
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Once a step."""
        self.calls += 1
        x = torch.tanh(self.big(x))
        if not (self.skips and self.calls % 2 == 0):
            x = x + self.middle(x)
        return self.head(x)


def batch(step: int, rank: int) -> torch.Tensor:
    """Another on each rank."""
    return torch.randn(3, BIG, generator=torch.Generator().manual_seed(10 * step + rank))


def norm_of(gradients: list[torch.Tensor]) -> float:
    """The L2 norm of all of them together, in double precision."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def own_norm(model: nn.Module, loss: torch.Tensor) -> float:
    """Of this rank's own gradients: computed without any hook."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    return norm_of([g for g in found if g is not None])


def poison(gradient: torch.Tensor, *, on: Callable[[], bool]) -> torch.Tensor:
    """One NaN, beyond the first block."""
    if not on():
        return gradient
    bad = gradient.clone()
    bad.view(-1)[-1] = float("nan")
    return bad


def data_parallel(
    rank: int,
    *,
    skips: bool = False,
    poisoned: bool = False,
    compress: bool = False,
    **options: object,
) -> Numbers:
    """DDP with a bucket for each tensor or two."""
    model = Net(skips=skips)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    if compress:
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    step = 0
    if poisoned and rank == 1:
        on = functools.partial(lambda: step == BAD)
        model.big.weight.register_hook(functools.partial(poison, on=on))
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(batch(step, rank)).square().mean()
        alone = Net(skips=skips)
        alone.load_state_dict(model.state_dict())
        alone.calls = model.calls - 1
        norms.append(own_norm(alone, alone(batch(step, rank)).square().mean()))
        loss.backward()
        optimizer.step()
    return {"own": norms}


def accumulating(rank: int) -> Numbers:
    """Two micro-batches a step: without averaging between them, but for the bad step."""
    model = Net()
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    step = micro = 0
    if rank == 1:
        on = functools.partial(lambda: step == BAD and micro == 0)
        model.middle.weight.register_hook(functools.partial(poison, on=on))
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        alone = Net()
        alone.load_state_dict(model.state_dict())
        losses = [alone(batch(2 * step + m, rank)).square().mean() for m in (0, 1)]
        norms.append(own_norm(alone, losses[0] + losses[1]))
        for micro in (0, 1):
            parallel.require_backward_grad_sync = step == BAD or micro == 1
            parallel(batch(2 * step + micro, rank)).square().mean().backward()
        optimizer.step()
    return {"own": norms}


def sharded(rank: int) -> Numbers:
    """FSDP2. One step is clipped."""
    model = Net()
    for layer in (model.big, model.middle, model.head):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        norms.append(norm_of([p.grad.full_tensor() for p in model.parameters()]))
        if step == STEPS - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return {"whole": norms}


def flat(rank: int, *, use_orig_params: bool, poisoned: bool = False) -> Numbers:
    """FSDP's first version: layers are joined, and cut where a rank's half ends."""
    model = Net()
    wrap = functools.partial(
        FullyShardedDataParallel,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    model.big = wrap(model.big)
    parallel = wrap(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, rank)
        if poisoned and rank == 1 and step == BAD:
            x[0, 0] = float("nan")
        parallel(x).square().mean().backward()
        own = norm_of([p.grad for p in parallel.parameters() if p.grad is not None])
        both = torch.tensor(own**2)
        dist.all_reduce(both)
        norms.append(math.sqrt(float(both)))
        optimizer.step()
    return {"whole": norms}


def tensor_parallel(rank: int) -> Numbers:
    """Two layers cut over the ranks, the third whole on both."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Net()
    parallelize_module(model, mesh, {"big": ColwiseParallel(), "middle": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.tanh(model.big(batch(step, 0)))
        model.head(model.middle(x)).square().mean().backward()
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                 for p in model.parameters()]  # fmt: skip
        norms.append(norm_of(whole))
        optimizer.step()
    return {"whole": norms}


def pipeline(rank: int) -> Numbers:
    """A layer on each rank."""
    torch.manual_seed(rank)
    layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.tanh(x))
        norms.append(norm_of([p.grad for p in layer.parameters()]))
        optimizer.step()
    return {"stage": norms}


SCENARIOS: dict[str, Callable[[int], Numbers]] = {
    "buckets": functools.partial(data_parallel, poisoned=True, gradient_as_bucket_view=True),
    "copied": functools.partial(data_parallel, poisoned=True),
    "static": functools.partial(data_parallel, static_graph=True),
    "unused": functools.partial(data_parallel, skips=True, find_unused_parameters=True),
    "compressed": functools.partial(data_parallel, compress=True),
    "accumulating": accumulating,
    "sharded": sharded,
    "flat": functools.partial(flat, use_orig_params=False),
    "flat_views": functools.partial(flat, use_orig_params=True),
    "flat_bad": functools.partial(flat, use_orig_params=True, poisoned=True),
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
}
CAPTURE = '{"budget": "100%", "collections": {"gradients": {"every": 1}}}'


def run_rank(rank: int, port: int, folder: Path) -> None:
    """All scenarios on one rank."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2"
    )
    os.environ["TOCSIN_RUN_ID"] = "r1"
    seen: dict[str, Numbers] = {}
    dist.init_process_group("gloo")
    for name, train in SCENARIOS.items():
        with captured(folder / name, TOCSIN_CAPTURE=CAPTURE):
            seen[name] = train(rank)
        dist.barrier()
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Fork both ranks; 0 if both have come through."""
    for name in SCENARIOS:
        (folder / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(r, port, folder)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
