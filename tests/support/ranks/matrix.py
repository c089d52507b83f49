"""DDP and FSDP2 on gloo ranks, one after the other, started with the hook by torchrun's own agent.

The agent forks its ranks, so that torch is imported once. Each trains without capture first, then
with it. `FOLDER/rank-N.json` is what this rank saw itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from support.trainings.captured import captured
from tocsin.emitter.hooks.torch_patches import hooks
from tocsin.emitter.training.context import current

STEPS = 5
EVERY_STEP = '{"collections": {"gradients": {"every": 1}}}'


def network() -> nn.Sequential:
    """The same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(step: int, rank: int) -> torch.Tensor:
    """Another on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator)


def data_parallel(rank: int) -> dict[str, list[float]]:
    """DDP, with a step of two micro-batches, and a NaN in the last batch of rank 1."""
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        x = batch(step, rank)
        if rank == 1 and step == STEPS - 1:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        seen = 0.0
        if step == 1:
            with model.no_sync():
                loss = model(batch(50, rank)).square().mean()
                loss.backward()
                seen += loss.item()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(seen + loss.item())
        squares = [float(p.grad.double().square().sum()) for p in model.parameters()]
        norms.append(sum(squares) ** 0.5)
        optimizer.step()
    return {"losses": losses, "norms": norms}


def fully_sharded(rank: int) -> dict[str, list[float]]:
    """FSDP2: each rank holds a part of each tensor. `norms` are of the whole gradients."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # its older place
        from torch.distributed._composable.fsdp import fully_shard
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        losses.append(loss.item())
        whole = [p.grad.full_tensor() for p in model.parameters()]
        norms.append(float(sum(g.double().square().sum() for g in whole)) ** 0.5)
        optimizer.step()
    return {"losses": losses, "norms": norms}


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What trains inside is not captured."""
    hooks.asleep = True
    try:
        yield
    finally:
        hooks.asleep = False


def twice(train: Callable[[int], dict[str, list[float]]], rank: int) -> dict[str, object]:
    """Without capture, then with what is in force."""
    with unwatched():
        plain = train(rank)
    return {"plain": plain, "watched": train(rank)}


def main(folder: Path) -> None:
    """Both ways of training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen = {"ddp": twice(data_parallel, rank)}
    assert current.session is not None
    current.session.end()
    hooks.reset()
    current.session = None
    try:
        with captured(folder / "sharded", TOCSIN_CAPTURE=EVERY_STEP):
            seen["fsdp"] = twice(fully_sharded, rank)
    except (
        RuntimeError,
        AttributeError,
        ImportError,
        NotImplementedError,
        AssertionError,
    ) as error:
        # Of the oldest versions: none for CPUs.
        seen["no fsdp"] = {"because": f"{type(error).__name__}: {error}"}
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    # What DDP and FSDP import, once for both ranks; whoever collects the tests does not need it.
    import torch._dynamo
    import torch.distributed.fsdp

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="matrix", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(config, main)(Path(sys.argv[1]))
