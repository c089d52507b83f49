"""Losses that the user names: `run.loss("aux", value)`.

A value is taken as it comes, a detached copy of one number on a GPU; what a step has of one name is
told as its mean, `loss.NAME`, beside the row of the step. In `eval()` each value is a row of its
own, as the losses of evaluations are: whoever reads them takes the mean.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording, on_device
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.frames import Mode

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

MAX_NAMES: Final = 100
MAX_VALUES: Final = 10_000
"""Values between two steps that are kept."""

MAX_WAITING: Final = 64
"""Steps whose values may be on their way from a GPU."""


class NamedLosses(Probe):
    """The named losses of one training."""

    name = "named losses"

    def __init__(self) -> None:
        self.wakes = NEVER
        self._names: list[str] = []
        self._values: list[float | torch.Tensor] = []
        self._known: set[str] = set()
        self._waiting: deque[tuple[int, Mode, list[str], HostCopy]] = deque()

    def reset(self) -> None:
        """Another training begins."""
        self.__init__()  # type: ignore[misc]  # all of it is state of one training

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Keep a loss of the step in progress: a number, or a tensor of one element, on any
        device.
        """
        if name not in self._known:
            if len(self._known) >= MAX_NAMES:
                return
            self._known.add(name)
        if len(self._names) >= MAX_VALUES:
            return
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.device.type == "cpu":
                value = float(value)
            elif is_recording():
                return
            else:
                value = value.reshape(1).to(torch.float32, copy=True)
        self._names.append(name)
        self._values.append(value)
        self.wakes = 0

    def stepped(self, training: Training, step: int) -> None:
        """A step of training is over, of which these are."""
        self.send(training, step, "train")

    def close(self, training: Training) -> None:
        """The training is over: send what was added since its last step."""
        self.send(training, training.next_step, "train")

    def send(self, training: Training, step: int, mode: Mode) -> None:
        """Send what was added as of this step, and what has arrived from a GPU. Never waits."""
        if self._names:
            names, values = self._names, self._values
            self._names, self._values = [], []
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            if tensors:
                with torch.no_grad():
                    home = tensors[0].device
                    moved = [on_device(v, home) for v in values]
                    self._waiting.append((step, mode, names, HostCopy(torch.cat(moved))))
            else:
                _send(training, step, mode, names, [float(v) for v in values])
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
        while self._waiting and self._waiting[0][3].ready():
            at, of_mode, names, copy = self._waiting.popleft()
            _send(training, at, of_mode, names, [float(v) for v in copy.values()])
        self.wakes = 0 if self._waiting else NEVER


def _send(training: Training, step: int, mode: Mode, names: list[str], values: list[float]) -> None:
    sums: dict[str, tuple[float, int]] = {}
    for name, value in zip(names, values, strict=True):
        total, n = sums.get(name, (0.0, 0))
        sums[name] = (total + value, n + 1)
    columns = tuple(f"loss.{name}" for name in sums)
    cells = tuple(total / n for total, n in sums.values())
    nonfinite = not all(map(math.isfinite, cells))
    training.step_row(StepRow(step, unix_us(), columns, cells, mode), urgent=nonfinite)
