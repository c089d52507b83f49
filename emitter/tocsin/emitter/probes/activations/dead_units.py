"""Which units of a ReLU are dead: active in hardly any value that is looked at.

A small batch, or a micro-batch of one, has too few values for that share. Then it is of the next
micro-batches of the step, too, and if these are not enough, of the next steps at which activations
are due.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tocsin.emitter.probes.activations.readings import Reading
from tocsin.emitter.probes.activations.samples import MAX_SAMPLES
from tocsin.schemas.records.collections import Mode

MIN_UNIT_SAMPLES: Final = 128
"""Of each unit, so that 1 % is one of them at least; a smaller batch is read whole."""

FEWEST: Final = 32
"""Below so many looks at a unit nothing is reported: a smaller batch waits for the next."""

INACTIVE: Final = 0.01
"""A unit is dead that is active in a smaller share of the looks."""


class DeadUnits:
    """The shares of dead units of one model."""

    def __init__(self) -> None:
        self._few: dict[tuple[Mode, str], UnitActivity] = {}
        """Of the ReLUs that have given too few values: what they have given, in earlier steps, too.
        """
        self._short: dict[str, Reading] = {}
        """Their readings of the step in progress, by name."""

    @property
    def short(self) -> bool:
        """Whether a ReLU of this step has given too few values so far."""
        return bool(self._short)

    def start_step(self) -> None:
        """Readings of another step, or batch of an evaluation, follow."""
        self._short = {}

    def needs(self, name: str) -> Reading | None:
        """The reading of that name in this step, if it has no share yet."""
        return self._short.get(name)

    def add(
        self, reading: Reading, output: torch.Tensor, mode: Mode, *, channels_first: bool
    ) -> None:
        """Give this reading the share of dead units, as far as there are enough values.

        Args:
            output: `[B, C, ...]` with `channels_first` (a convolution), else `[..., C]`, without a
                graph; a unit is one of the C.
        """
        units = unit_activity(output, channels_first=channels_first)
        if units is None:
            return
        if reading.slot is None:
            units = units.plus(self._few.pop((mode, reading.name), None))
        share = units.dead_share()
        if share is not None:
            reading.columns, reading.values = ("dead",), (share,)
            reading.read()
            self._short.pop(reading.name, None)
        elif reading.slot is None:  # a graph may stand for several modules
            self._few[mode, reading.name] = units
            self._short[reading.name] = reading


@dataclass(frozen=True, slots=True, eq=False)
class UnitActivity:
    """How often the units of a ReLU were active, in so many `looks` at each.

    `active` is `[units]`, float32; `poison` a scalar, NaN if a value was, else 0. Both are on the
    device of the output.
    """

    looks: int
    active: torch.Tensor
    poison: torch.Tensor

    def plus(self, earlier: UnitActivity | None) -> UnitActivity:
        """With that of an earlier output of the same module; by itself if the units are others."""
        if earlier is None or earlier.active.shape != self.active.shape:
            return self
        if earlier.active.device != self.active.device:
            return self
        return UnitActivity(
            self.looks + earlier.looks,
            self.active + earlier.active,
            self.poison + earlier.poison,
        )

    def dead_share(self) -> torch.Tensor | None:
        """The share of dead units, a scalar; NaN if a value is NaN, None for too few looks."""
        if self.looks < FEWEST:
            return None
        # NaN is not greater than 0, and dead is not what it is: it makes the share NaN.
        return (self.active < INACTIVE * self.looks).mean(dtype=torch.float32) + self.poison


def unit_activity(output: torch.Tensor, *, channels_first: bool) -> UnitActivity | None:
    """How often each unit is active; None if there are no units.

    It samples about 16,384 values, at least 128 for each unit, evenly spread over the batch.

    Args:
        output: `[B, C, ...]` with `channels_first` (a convolution), else `[..., C]`; a unit is one
            of the C.
    """
    looks = _looks_at_units(output, channels_first=channels_first)
    if looks is None:
        return None
    active = (looks > 0).sum(dim=1, dtype=torch.float32)
    return UnitActivity(looks.shape[1], active, 0.0 * looks.sum(dtype=torch.float32))


def _looks_at_units(output: torch.Tensor, *, channels_first: bool) -> torch.Tensor | None:
    """A part of the output as [units, looks]; None: there are no units."""
    if output.dim() < 2:
        return None
    if channels_first and output.dim() > 2:
        units, width = output.shape[1], output.shape[-1]
        values = output.flatten(2)
        looks = max(MIN_UNIT_SAMPLES, MAX_SAMPLES // max(1, units))
        values = values[:: max(1, values.shape[0] // looks)]
        apart = max(1, values.shape[0] * values.shape[2] // looks)
        if apart > 1 and apart % width == 0:
            apart += 1  # not the same column of the image each time
        sample = values[:, :, ::apart].movedim(1, 0).reshape(units, -1)
    else:
        units = output.shape[-1]
        values = output.reshape(-1, units)
        looks = max(MIN_UNIT_SAMPLES, MAX_SAMPLES // max(1, units))
        sample = values[:: max(1, values.shape[0] // looks)].t()
    return sample if units and sample.shape[1] else None
