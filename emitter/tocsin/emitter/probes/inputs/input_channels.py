"""What the channels of a training's inputs look like: mean, spread and range of each.

An image batch [n, channels, height, width] has its channels in dimension 1 (volumes likewise), any
other in its last. Each look takes up to 16,384 values, evenly spread over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.statistics.arrays import as_float32
from tocsin.emitter.statistics.async_copy import HostCopy
from tocsin.emitter.statistics.readable import NUMBERS, readable
from tocsin.emitter.statistics.tables import Table

VALUES: Final = 16_384
MAX_CHANNELS: Final = 1024
"""Of more features no channel is distinguished from the others."""

Doubles = npt.NDArray[np.float64]


MAX_UNMERGED: Final = 32
"""Looks that are kept as they came; then they are one."""


class ChannelLook:
    """One look at one input, or several as one. `numel` is how many values of each channel.

    `packed` is what `numbers` returns, as a tensor `[5, channels]` on any device.
    """

    def __init__(self, name: str, packed: torch.Tensor, numel: int) -> None:
        self.name: Final = name
        self.numel: Final = numel
        self._packed = packed if packed.device.type == "cpu" else HostCopy(packed)

    @property
    def ready(self) -> bool:
        """Whether the numbers are on the host; never waits."""
        return not isinstance(self._packed, HostCopy) or self._packed.ready()

    def numbers(self) -> Doubles:
        """`[5, channels]`: how many finite values, their mean, variance, smallest and largest; only
        if `ready`.
        """
        if isinstance(self._packed, HostCopy):
            return self._packed.values()
        found: Doubles = self._packed.numpy().astype(np.float64)
        return found


def sample_channels(name: str, batch: torch.Tensor) -> ChannelLook | None:
    """Look at a batch of inputs; None if it holds no real numbers, or none at all.

    Args:
        name: of the input.
        batch: `[B, C, ...]` with 4 or 5 dimensions, else `[..., C]`, on any device. With one
            dimension, or more than 1,024 channels C, all of it is one channel.
    """
    numbers = readable(batch, NUMBERS)
    if numbers is None or numbers.numel() == 0:
        return None
    with torch.no_grad():
        values = _sample(numbers).to(torch.float32)
        finite = torch.isfinite(values)
        known = finite.sum(1, dtype=torch.float32)
        some = known.clamp(min=1)
        zeroed = torch.where(finite, values, 0)
        mean = zeroed.sum(1) / some
        apart = torch.where(finite, values - mean[:, None], 0)
        packed = torch.stack(
            (
                known,
                mean,
                apart.square().sum(1) / some,
                torch.where(finite, values, torch.inf).amin(1),
                torch.where(finite, values, -torch.inf).amax(1),
            )
        )
    return ChannelLook(name, packed, values.shape[1])


def _sample(batch: torch.Tensor) -> torch.Tensor:
    """[channels, values] of a batch."""
    if batch.dim() < 2:
        flat = batch.reshape(1, -1)
        return flat[:, :: max(1, flat.shape[1] // VALUES)]
    if batch.dim() in (4, 5):
        channels = batch.shape[1]
        if channels > MAX_CHANNELS:
            return _sample(batch.reshape(-1))
        values = batch.flatten(2)
        each = max(16, VALUES // channels)
        # A quarter of them from different samples: normalisation shows across the batch.
        values = values[:: max(1, values.shape[0] * 4 // each)]
        apart = max(1, values.shape[0] * values.shape[2] // each)
        if apart > 1 and apart % batch.shape[-1] == 0:
            apart += 1  # not the same column of the image each time
        return values[:, :, ::apart].movedim(1, 0).reshape(channels, -1)
    channels = batch.shape[-1]
    if channels > MAX_CHANNELS:
        return _sample(batch.reshape(-1))
    rows = batch.reshape(-1, channels)
    return rows[:: max(1, rows.shape[0] // max(16, VALUES // channels))].t()


class InputChannels:
    """What was seen in one mode since it was last sent, by input and channel."""

    def __init__(self) -> None:
        self._looks: dict[str, list[ChannelLook]] = {}

    def __bool__(self) -> bool:
        return bool(self._looks)

    def add(self, seen: ChannelLook) -> None:
        """A look whose numbers are ready."""
        looks = self._looks.setdefault(seen.name, [])
        looks.append(seen)
        if len(looks) >= MAX_UNMERGED:
            self._looks[seen.name] = [_together(looks)]

    def drain(self) -> list[Table]:
        """A table `input_channels`: `mean std min max` of finite values; `numel nonfinite`."""
        seen, self._looks = self._looks, {}
        names: list[str] = []
        values: list[Doubles] = []
        counts: list[npt.NDArray[np.uint64]] = []
        for name, looks in seen.items():
            whole = _together(looks)
            known, mean, variance, low, high = whole.numbers()
            width, good = len(known), known > 0
            least, most = np.where(good, low, 0), np.where(good, high, 0)
            names += [f"{name}.{i}" for i in range(width)]
            values.append(np.column_stack((mean, np.sqrt(variance), least, most)))
            counted = np.column_stack((np.full(width, whole.numel), whole.numel - known))
            counts.append(counted.astype(np.uint64))
        if not names:
            return []
        return [
            Table(
                "input_channels",
                tuple(names),
                as_float32(np.concatenate(values)),
                np.concatenate(counts),
                columns=("mean", "std", "min", "max"),
                count_columns=("numel", "nonfinite"),
            )
        ]


@np.errstate(all="ignore")
def _together(looks: Sequence[ChannelLook]) -> ChannelLook:
    """Several looks at an input as one; those with another number of channels are left out."""
    if len(looks) == 1:
        return looks[0]
    found = [(one.numbers(), one.numel) for one in looks]
    width = found[-1][0].shape[1]
    found = [pair for pair in found if pair[0].shape[1] == width]
    known, mean, variance, low, high = np.stack([n for n, _ in found]).transpose(1, 0, 2)
    total = known.sum(0)
    some = np.maximum(total, 1)
    whole = (known * mean).sum(0) / some
    spread = (known * (variance + (mean - whole) ** 2)).sum(0) / some
    packed = torch.from_numpy(np.stack((total, whole, spread, low.min(0), high.max(0))))
    return ChannelLook(looks[-1].name, packed, sum(n for _, n in found))
