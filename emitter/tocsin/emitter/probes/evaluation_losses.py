"""Losses of evaluations: the values of loss functions that are called while nothing trains."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tocsin.emitter.plan.collections import PREDICT
from tocsin.emitter.plan.schedule import Due
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.schemas.monotonic_clock import unix_us

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training
    from tocsin.schemas.records.collections import Mode


MAX_PENDING: Final = 64
"""Losses on a GPU that are copied together, and copies that are waited for."""


class At(NamedTuple):
    """Where losses belong, and whether one that is finite is reported."""

    step: int
    mode: Mode
    due: bool


class EvaluationLosses(Probe):
    """The evaluation losses of one training, and those that are being copied from a GPU."""

    name = "evaluation losses"

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self._training = training
        self._plan = training.settings.plan("losses")
        self._held: list[torch.Tensor] = []
        self._copies: deque[tuple[At, HostCopy]] = deque(maxlen=MAX_PENDING)
        self._at = At(0, "eval", due=True)
        self._first: tuple[int, str] = (-1, "")

    def evaluation_loss(self, function: str, loss: torch.Tensor, *, here: bool) -> None:
        """This function computed a loss, a tensor of one element, while the model is in `eval()`.

        Where none is due it is read, too: one that is not finite is always sent.
        """
        step = self._training.last_step
        mode: Mode = "predict" if PREDICT in self._training.phases else "eval"
        schedule = None if self._plan is None else self._plan.schedule(mode)
        if step is None:
            return
        at = At(step, mode, due=schedule is not None and schedule.due(step, 1))
        if self._first[0] != step:
            self._first = (step, function)
            self._training.evaluated_step = step
        if self._first[1] != function:
            return
        loss = loss.detach()
        if loss.device.type == "cpu":
            self._send(at, float(loss))
            return
        if is_recording():
            return
        if self._held and (at != self._at or len(self._held) >= MAX_PENDING):
            self.flush()
        self._at, self.reads = at, 0
        self._held.append(loss.reshape(1).to(torch.float32, copy=True))

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost."""
        self.reads = 0 if self.flush() else NEVER

    def flush(self) -> bool:
        """Start the copies of what is held; send what has arrived. Never waits."""
        if self._held:
            held, self._held = self._held, []
            with torch.no_grad():
                self._copies.append((self._at, HostCopy(torch.cat(held))))
        while self._copies and self._copies[0][1].ready():
            at, copy = self._copies.popleft()
            for value in copy.values():
                self._send(at, float(value))
        return bool(self._copies)

    def _send(self, at: At, value: float) -> None:
        nonfinite = not math.isfinite(value)
        if at.due or nonfinite:
            row = StepRow(at.step, unix_us(), ("loss",), (value,), at.mode)
            self._training.step_row(row, urgent=nonfinite)
