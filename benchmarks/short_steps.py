"""What watching costs where steps take a millisecond: CPU time of the training thread, A against B.

For each kind of loop two copies of the same training take turns in one process, block by block: one
with tocsin's hooks in torch, one with torch as it was before (the hooks are taken out and put back
between blocks). Compared is the CPU time of the training's own thread (`time.thread_time`), which
waits for nobody: what other processes take of the machine is not in it, but for what they throw
out of its caches. Reported are the median over the rounds of the difference in µs a step and of the
ratio, with its middle half; the difference between the fastest quarters of the blocks, which others
have disturbed least; what tocsin has measured itself; and the CPU that its sender takes beside the
training, on a thread of its own.

    python benchmarks/short_steps.py                         # all loops
    python benchmarks/short_steps.py mlp clip --rounds 60

With `--before-update` one training is watched in all blocks, and in every second one it also looks
at its gradients in front of each step (`stop: {before_update: true}`): the difference is what that
look costs alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Train = Callable[[int], None]
"""Trains so many steps."""

BLOCK_S = 0.025
"""How long a block of steps takes, about."""

WARM_UP_S = 6.0


def network(width: int = 64, depth: int = 2) -> nn.Sequential:
    """A small network of ReLUs."""
    layers: list[nn.Module] = [nn.Linear(32, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batch(rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes."""
    return torch.randn(rows, 32), torch.randint(0, 10, (rows,))


def mlp() -> Train:
    """The plain loop: six tensors, one loss, AdamW."""
    return plain()


def clip() -> Train:
    """The same with `clip_grad_norm_`."""
    return plain(clipped=True)


def plain(*, clipped: bool = False) -> Train:
    """A loop over one batch."""
    model, (inputs, targets) = network(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return train


def loader() -> Train:
    """Batches from a DataLoader, epoch after epoch."""
    model, data = network(), torch.utils.data.TensorDataset(*batch(4096))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = torch.utils.data.DataLoader(data, batch_size=64)
    state = {"iterator": iter(batches)}

    def train(steps: int) -> None:
        for _ in range(steps):
            found = next(state["iterator"], None)
            if found is None:
                state["iterator"] = iter(batches)
                found = next(state["iterator"])
            inputs, targets = found
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def accumulate() -> Train:
    """Four backward calls a step."""
    model, (inputs, targets) = network(), batch(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(4):
                (functional.cross_entropy(model(inputs), targets) / 4).backward()
            optimizer.step()

    return train


def amp() -> Train:
    """A GradScaler, and clipping of what it has unscaled."""
    model, (inputs, targets) = network(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return train


def gan() -> Train:
    """Two optimizers that take turns."""
    generator, discriminator = network(), nn.Sequential(network(), nn.Linear(10, 1))
    first = torch.optim.Adam(generator.parameters(), lr=1e-4)
    second = torch.optim.Adam(discriminator.parameters(), lr=1e-4)
    noise, real = torch.randn(128, 32), torch.randn(128, 32)
    widen = torch.randn(10, 32)
    ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)

    def train(steps: int) -> None:
        judged = functional.binary_cross_entropy_with_logits
        for _ in range(steps):
            fake = generator(noise) @ widen
            second.zero_grad()
            loss = judged(discriminator(real), ones) + judged(discriminator(fake.detach()), zeros)
            loss.backward()
            second.step()
            first.zero_grad()
            judged(discriminator(fake), ones).backward()
            first.step()

    return train


def in_backward() -> Train:
    """One AdamW for each of 82 tensors, stepped as soon as its gradient is there."""
    model, (inputs, targets) = network(128, 40), batch(128)
    own = {p: torch.optim.AdamW([p], lr=1e-5, foreach=False) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def train(steps: int) -> None:
        for _ in range(steps):
            functional.cross_entropy(model(inputs), targets).backward()

    return train


def tensors() -> Train:
    """Ten thousand small tensors and SGD."""
    parameters = [nn.Parameter(torch.full((16,), 0.1)) for _ in range(10_000)]
    model = nn.ParameterList(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = torch.cat(parameters).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def convolutions() -> Train:
    """A small convolutional network with batch norm, steps of some ten milliseconds."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def transformer() -> Train:
    """A language model of two small layers, steps of a few milliseconds."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(128, 64), nn.TransformerEncoder(layer, 2))
    head = nn.Linear(64, 128)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)
    tokens = torch.randint(0, 128, (4, 16))

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = functional.cross_entropy(head(model(tokens)).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


LOOPS: dict[str, Callable[[], Train]] = {
    "mlp": mlp,
    "clip": clip,
    "loader": loader,
    "accumulate": accumulate,
    "amp": amp,
    "gan": gan,
    "in_backward": in_backward,
    "tensors": tensors,
    "cnn": convolutions,
    "gpt": transformer,
}


class Switch:
    """Tocsin's hooks in torch, which can be taken out and put back."""

    def __init__(self) -> None:
        """Remember torch as it is; to be made before the hooks are installed."""
        import torch.optim.optimizer as optimizers
        import torch.utils.data.dataloader as loaders
        from torch.nn.modules import loss

        self._owners: list[Any] = [
            torch, torch.autograd, nn.functional, nn.utils, nn.utils.clip_grad,
            torch.amp.GradScaler, loaders._BaseDataLoaderIter,
            nn.parallel.DistributedDataParallel, torch.optim.lr_scheduler.LRScheduler,
            *_below(nn.Module), loss._Loss,
        ]  # fmt: skip
        self._plain = [dict(vars(owner)) for owner in self._owners]
        self._hooks: tuple[dict[int, Any], dict[int, Any]] = (
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )

    @contextmanager
    def guard_out(self) -> Iterator[None]:
        """No look at the gradients in front of a step, inside of the block."""
        from tocsin.emitter.hooks.update_guard import UpdateGuard

        before, _ = self._hooks
        # The last of them: put back, it is that again.
        number = next(reversed(before))
        guard = before.pop(number)
        assert isinstance(guard.__self__, UpdateGuard)
        try:
            yield
        finally:
            before[number] = guard

    @contextmanager
    def out(self) -> Iterator[None]:
        """Torch as it was, inside of the block."""
        changed = []
        for owner, before in zip(self._owners, self._plain, strict=True):
            for name, value in list(vars(owner).items()):
                if name in before and before[name] is not value and callable(value):
                    changed.append((owner, name, value))
                    setattr(owner, name, before[name])
                elif name not in before and name == "__call__":
                    changed.append((owner, name, value))
                    delattr(owner, name)
        registered = [dict(hooks) for hooks in self._hooks]
        for hooks in self._hooks:
            hooks.clear()
        try:
            yield
        finally:
            for owner, name, value in changed:
                setattr(owner, name, value)
            for hooks, ours in zip(self._hooks, registered, strict=True):
                hooks.update(ours)


def _below(kind: Any) -> list[type]:
    found: list[type] = []
    for below in kind.__subclasses__():
        found += [below, *_below(below)]
    return list(dict.fromkeys(found))


def lasts(train: Train, steps: int) -> float:
    """CPU seconds of this thread for each of so many steps."""
    began = time.thread_time()
    train(steps)
    return (time.thread_time() - began) / steps


def _fast(times_s: list[float]) -> float:
    """The mean of the fastest quarter."""
    return statistics.fmean(sorted(times_s)[: -(-len(times_s) // 4)])


def measure(
    name: str, rounds: int, warm_up_s: float, *, before_update: bool = False
) -> dict[str, Any]:
    """One loop, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    switch = Switch()
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as folder:
        os.environ.update(
            TOCSIN_RUN_ID="bench", TOCSIN_JOB_ID="bench", TOCSIN_BUS=f"embedded:{folder}/bus.db"
        )
        if before_update:
            os.environ["TOCSIN_BEFORE_UPDATE"] = "protect_last_good"
        from tocsin.emitter.hooks import torch_patches
        from tocsin.emitter.training.context import current

        torch_patches.install()
        make = LOOPS[name]
        watched = make()
        first_s = time.thread_time()
        watched(1)
        first_s = time.thread_time() - first_s
        out = switch.guard_out if before_update else switch.out
        with out():
            left_alone = watched if before_update else make()
            left_alone(3)
            began = time.thread_time()
            left_alone(3)
            block = max(3, int(BLOCK_S / ((time.thread_time() - began) / 3)))
        until = time.thread_time() + warm_up_s
        while time.thread_time() < until:
            watched(block)
        gc.collect()
        gc.freeze()
        isolation = current.isolation
        spent_s, beside_s = isolation.seconds, 0.0
        plain_s: list[float] = []
        watched_s: list[float] = []
        for turn in range(rounds):
            for ours in (turn % 2 == 0, turn % 2 == 1):
                if ours:
                    process_s = time.process_time()
                    watched_s.append(lasts(watched, block))
                    beside_s += time.process_time() - process_s - block * watched_s[-1]
                else:
                    with out():
                        plain_s.append(lasts(left_alone, block))
        ratios = [100 * (b / a - 1) for a, b in zip(plain_s, watched_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        session = current.session
        assert session is not None
        assert session.training is not None
        steps = block * rounds
        found = {
            "loop": name,
            "step_us": 1e6 * statistics.median(plain_s),
            "added_us": 1e6
            * statistics.median(b - a for a, b in zip(plain_s, watched_s, strict=True)),
            "quiet_us": 1e6 * (_fast(watched_s) - _fast(plain_s)),
            "percent": middle,
            "low": low,
            "high": high,
            "hooks_us": 1e6 * (isolation.seconds - spent_s) / steps,
            "beside_us": 1e6 * beside_s / steps,
            "first_ms": 1e3 * first_s,
            "intervals": session.training.schedule.intervals(),
            "off": dict(isolation.off),
        }
        session.end()
        return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=", ".join(LOOPS))
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="one loop, here, as a line of JSON")
    parser.add_argument(
        "--before-update", action="store_true", help="what a look before each update costs"
    )
    options = parser.parse_args()
    unknown = [name for name in options.loops if name not in LOOPS]
    if unknown:
        parser.error(f"expected {', '.join(LOOPS)}; found {unknown[0]}")
    if options.json:
        found = measure(
            options.loops[0], options.rounds, options.warm_up, before_update=options.before_update
        )
        print(json.dumps(found))
        return
    adds = "the look adds" if options.before_update else "tocsin adds"
    print(
        f"{'loop':<12} {'step':>9} {adds:>13} {'quiet':>9} {'ratio (middle half)':>28} "
        f"{'in hooks':>9} {'beside':>9} {'first step':>11}"
    )
    for name in options.loops or LOOPS:
        command = [sys.executable, __file__, name, "--json", "--rounds", str(options.rounds)]
        command += ["--warm-up", str(options.warm_up)]
        command += ["--before-update"] if options.before_update else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:<12} failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        ratio = f"{row['percent']:+.2f} % ({row['low']:+.2f} … {row['high']:+.2f})"
        print(
            f"{name:<12} {row['step_us']:6.0f} µs {row['added_us']:10.1f} µs "
            f"{row['quiet_us']:6.1f} µs {ratio:>28} {row['hooks_us']:6.1f} µs "
            f"{row['beside_us']:6.1f} µs {row['first_ms']:8.0f} ms"
            + (f"  off: {row['off']}" if row["off"] else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
