"""One training that runs a block of steps for each line that it reads; driven by `capture.py`.

Reads a line with a number of steps, trains that many, and prints one line of JSON: wall seconds,
CPU seconds of the whole process and of the training thread, resident memory in bytes, and, where
tocsin watches, what its hooks have measured. Between lines it is idle. The models are those of the
demo in their benchmark size, and a tiny one with steps of less than a millisecond.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch.nn import functional

from tocsin.console.demo.trainings import gpt, resnet

WATCHERS = ("none", "naive", "wandb", "smdebug-reductions", "smdebug-full")
"""What may watch inside of this process; tocsin does so from outside."""

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Watch = Callable[[int], None]


def build(name: str, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Batches]:
    """Model, optimizer and an endless stream of batches."""
    if name == "resnet":
        wide = resnet.SIZES["bench"]
        model: torch.nn.Module = resnet.ResNet(wide).to(device)
        images, labels = resnet.digits(channels=wide.channels, pixels=wide.pixels)
        return (
            model,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            resnet.batches(images, labels, batch=wide.batch, seed=0),
        )
    if name == "tiny":
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        ).to(device)
        rows = torch.randn(64, 64), torch.randint(0, 10, (64,))
        return model, torch.optim.AdamW(model.parameters()), iter(lambda: rows, None)
    size = gpt.SIZES["bench"]
    if name == "gpt124m":
        size = gpt.GptSize(12, 768, 12, context=1024, batch=8, vocabulary=4096)
    model = gpt.Gpt(size).to(device)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-4),
        gpt.batches(gpt.text_tokens(size.vocabulary), size, seed=0),
    )


def naive(model: torch.nn.Module) -> Watch:
    """Nine statistics of each gradient and weight at each step, each fetched by itself."""

    def fetch(_: int) -> None:
        for parameter in model.parameters():
            for tensor in (parameter.detach(), parameter.grad):
                if tensor is None:
                    continue
                for value in (
                    tensor.min(), tensor.max(), tensor.mean(), tensor.std(), tensor.abs().sum(),
                    tensor.norm(), (tensor == 0).sum(), tensor.isnan().sum(), tensor.isinf().sum(),
                ):  # fmt: skip
                    value.item()

    return fetch


def wandb_watch(model: torch.nn.Module) -> Watch:
    """`wandb.watch(log="all", log_freq=1)` of an offline run."""
    import wandb

    run = wandb.init(mode="offline", project="bench", settings=wandb.Settings(silent=True))
    wandb.watch(model, log="all", log_freq=1)
    return lambda step: run.log({"step": step})


def smdebug_hook(model: torch.nn.Module, *, reductions: bool) -> Watch:
    """The reference's hook at each step: seven reductions of all tensors, or the tensors."""
    from smdebug import SaveConfig
    from smdebug.core.reduction_config import ReductionConfig
    from smdebug.pytorch import Hook

    config = ReductionConfig(reductions=["min", "max", "mean", "std", "sum"], norms=["l1", "l2"])
    hook: Any = Hook(
        out_dir=f"smdebug-{time.time_ns()}",
        save_config=SaveConfig(save_interval=1),
        reduction_config=config if reductions else None,
        include_collections=["weights", "gradients", "losses"],
    )
    hook.register_module(model)
    return lambda _: None


def watch_with(name: str, model: torch.nn.Module) -> Watch:
    """What that watcher does after each backward call."""
    if name == "naive":
        return naive(model)
    if name == "wandb":
        return wandb_watch(model)
    if name.startswith("smdebug"):
        return smdebug_hook(model, reductions=name.endswith("reductions"))
    return lambda _: None


def ours() -> dict[str, object]:
    """What tocsin's hooks in this process have measured; empty where there are none."""
    hooks_module = sys.modules.get("tocsin.emitter.hooks.torch_patches")
    capture = None if hooks_module is None else hooks_module.hooks.capture
    if capture is None:
        return {}
    return {
        "hooks_s": capture.training.isolation.seconds,
        "intervals": capture.schedule.intervals(),
        "costs_s": {n: s.cost_s for n, s in capture.schedule.budget.shares.items()},
    }


def main() -> None:
    """Train blocks until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["gpt", "resnet", "tiny", "gpt124m"])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--watcher", choices=WATCHERS, default="none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model, optimizer, data = build(arguments.model, arguments.device)
    watch = watch_with(arguments.watcher, model)
    forward = torch.compile(model) if arguments.compile else model
    half = torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.device == "cuda")
    process, step = psutil.Process(), 0
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        begun, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(int(line)):
            inputs, targets = (tensor.to(arguments.device) for tensor in next(data))
            with half:
                outputs = forward(inputs)
                loss = functional.cross_entropy(
                    outputs.reshape(-1, outputs.shape[-1]), targets.flatten()
                )
            optimizer.zero_grad()
            loss.backward()
            watch(step)
            optimizer.step()
            step += 1
            loss.item()  # most loops print or sum it
        found = {
            "wall_s": time.perf_counter() - begun,
            "cpu_s": time.process_time() - cpu,
            "thread_s": time.thread_time() - thread,
            "memory_bytes": process.memory_info().rss,
            **ours(),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
