"""Quantiles of tensors: their samples are taken where they are, and sorted on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tocsin.emitter.statistics.arrays import Doubles
from tocsin.emitter.statistics.async_copy import HostCopy, by_device
from tocsin.emitter.statistics.cpu_rows import as_numpy
from tocsin.emitter.statistics.quantiles import BLOCK, BLOCKS, SAMPLE, quantile_rows
from tocsin.emitter.statistics.stacks import stacks
from tocsin.schemas.records.frames import Floats


class Quantiles:
    """Quantiles of real tensors, each `[n]`. On a GPU they come later."""

    def __init__(self, flat: Sequence[torch.Tensor]) -> None:
        self._numel = [tensor.numel() for tensor in flat]
        self._copies: list[tuple[list[int], HostCopy]] = []
        self._rows: Floats | None = None
        with torch.no_grad():
            if all(tensor.is_cpu for tensor in flat):
                samples = [_samples(tensor[None])[0] for tensor in flat]
                self._rows = quantile_rows([as_numpy(sample) for sample in samples])
                return
            for places in by_device(flat).values():
                at: list[int] = []
                together: list[torch.Tensor] = []
                for of, rows in stacks([flat[i] for i in places]):
                    at += [places[i] for i in of]
                    together.append(_samples(rows).reshape(-1).float())
                    del rows  # before the next stack is made
                if at:
                    self._copies.append((at, HostCopy(torch.cat(together))))

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return all(copy.ready() for _, copy in self._copies)

    @property
    def rows(self) -> Floats:
        """float32[tensors, QUANTILES], once they are ready."""
        if self._rows is None:
            samples: list[Doubles] = [np.zeros(0)] * len(self._numel)
            for at, copy in self._copies:
                ends = np.cumsum([min(self._numel[i], SAMPLE) for i in at])
                for i, sample in zip(at, np.split(copy.values(), ends[:-1]), strict=True):
                    samples[i] = sample
            self._rows = quantile_rows(samples)
            self._copies.clear()
        return self._rows


def _samples(rows: torch.Tensor) -> torch.Tensor:
    """The sample of each row; a view."""
    n = rows.shape[1]
    if n <= SAMPLE:
        return rows
    apart = n // BLOCKS
    return rows[:, : apart * BLOCKS].unflatten(1, (BLOCKS, apart))[:, :, :BLOCK]
