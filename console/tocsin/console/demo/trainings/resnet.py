"""A small ResNet learns scikit-learn's handwritten digits, which ship with scikit-learn.

python -m tocsin.console.demo.trainings.resnet --steps 200
python -m tocsin.console.demo.trainings.resnet --fault nan_batch --fault-at 50
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from tocsin.console.demo.trainings import common

CLASSES = 10
DIVERGING_RATE = 50.0
FAULTS = ("nan_batch", "diverge", "stall")


@dataclasses.dataclass(frozen=True, slots=True)
class ResNetSize:
    """The shape of the model and of one batch; pixels is the edge of a square image."""

    stages: int
    blocks: int
    width: int
    channels: int
    pixels: int
    batch: int


SIZES = {
    "test": ResNetSize(stages=3, blocks=1, width=16, channels=1, pixels=16, batch=64),
    "bench": ResNetSize(stages=4, blocks=2, width=32, channels=3, pixels=32, batch=64),
}


class ResidualBlock(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two 3x3 convolutions with batch normalisation around a shortcut."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.relu2(y + self.shortcut(x))


class ResNet(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A residual network: images in, logits of the ten digits out."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        self.stem = nn.Conv2d(size.channels, size.width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(size.width)
        self.stem_relu = nn.ReLU()
        self.stages = nn.ModuleList()
        before = size.width
        for stage in range(size.stages):
            after = size.width * 2**stage
            self.stages.append(
                nn.Sequential(
                    *(
                        ResidualBlock(
                            before if index == 0 else after,
                            after,
                            stride=2 if index == 0 and stage > 0 else 1,
                        )
                        for index in range(size.blocks)
                    )
                )
            )
            before = after
        self.head = nn.Linear(before, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem_relu(self.stem_norm(self.stem(images)))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))


def digits(*, channels: int = 1, pixels: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 1,797 digits as images in [-1, 1], enlarged, and their labels."""
    images, labels = load_digits(return_X_y=True)
    enlarged = functional.interpolate(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1,
        size=(pixels, pixels),
        mode="bilinear",
    )
    return enlarged.repeat(1, channels, 1, 1), torch.tensor(labels)


def batches(
    images: torch.Tensor, labels: torch.Tensor, *, batch: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random batches, with a little noise on the pixels, for ever."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (batch,), generator=chance)
        clean = images[chosen]
        yield clean + 0.5 * torch.randn(clean.shape, generator=chance), labels[chosen]


class HangingBatches(IterableDataset):  # type: ignore[misc]  # torch has no types here
    """Batches up to a step, and then a read that never returns, as of a file server gone away."""

    def __init__(
        self,
        data: Iterator[tuple[torch.Tensor, torch.Tensor]],
        *,
        hang_at: int,
        on_hang: Callable[[], None],
    ) -> None:
        """`on_hang` is called when it begins to hang."""
        self._data = data
        self._hang_at = hang_at
        self._on_hang = on_hang

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self._hang_at):
            yield next(self._data)
        never_written, _ = os.pipe()
        self._on_hang()
        os.read(never_written, 1)


def hanging(dataset: HangingBatches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what a worker process of torch's data loader reads, and hang when it hangs."""
    # Forked: batches() is a generator, which cannot be sent to a process that starts afresh.
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    yield from loader


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    arguments = common.training_parser(
        "Train a small ResNet on scikit-learn's handwritten digits.",
        learning_rate=0.05,
        faults=FAULTS,
        sizes=tuple(SIZES),
    ).parse_args(argv)
    size = SIZES[arguments.size]
    device = common.prepare(seed=arguments.seed, threads=arguments.threads, device=arguments.device)
    model = ResNet(size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    data = batches(
        *digits(channels=size.channels, pixels=size.pixels),
        batch=arguments.batch or size.batch,
        seed=arguments.seed,
    )
    printer = common.Printer(every=arguments.print_every, times=arguments.times)
    if arguments.fault == "stall":
        at = arguments.fault_at
        on_hang = partial(printer.fault, "stall", at, "the data loader's worker hangs")
        data = hanging(HangingBatches(data, hang_at=at, on_hang=on_hang))
    step = 0
    try:
        for step in range(arguments.steps):
            fault = arguments.fault if step == arguments.fault_at else None
            images, labels = (part.to(device) for part in next(data))
            if fault == "nan_batch":
                images[0] = float("nan")
                printer.fault(fault, step, "one image of the batch is corrupt, all NaN")
            if fault == "diverge":
                for group in optimizer.param_groups:
                    group["lr"] = DIVERGING_RATE
                printer.fault(fault, step, f"learning rate {arguments.lr} -> {DIVERGING_RATE}")
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            printer.step(step, loss)
            if arguments.save_every and (step + 1) % arguments.save_every == 0:
                common.save_checkpoint(
                    arguments.save_to, step=step, model=model, optimizer=optimizer
                )
    finally:
        printer.left(step)
    common.finish(model, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
