"""Steps that do not come: a loop, or a GradScaler, has thrown the gradients of a batch away.

A loss that is not finite hurts nothing if no step is made with it. So where it began is held back
until the step is there; where the step is skipped instead it is reported as a warning
(`nonfinite_skipped`), and as the loss of the step only after `BAD_IN_A_ROW` of them: then no step
may ever follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch

from tocsin.emitter.probes.losses import Loss, on_host
from tocsin.emitter.probes.nonfinite_forward import (
    MAX_SEARCHES,
    MAX_SEARCHES_PER_STEP,
    BadValue,
    first_bad_value,
)
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.training.training import Training
from tocsin.schemas.monotonic_clock import unix_us

BAD_IN_A_ROW: Final = 5
"""Skipped steps in a row whose losses were not finite, after which that is the training's loss."""

_MAX_COPIES: Final = 16


class SkippedSteps:
    """The skipped steps of one training."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._count = 0
        self._bad = 0
        self._origin: BadValue | None = None
        self._first: BadValue | None = None
        """Where the first bad loss since the last step began."""
        self._copies: deque[HostCopy] = deque(maxlen=_MAX_COPIES)
        self._searches = self._all_searches = 0
        self.any = False
        """Whether the next step has something to send of this."""

    def bad_loss(
        self,
        loss: object,
        names: Mapping[int, str],
        state_of: Callable[[torch.Tensor], Iterable[object]],
    ) -> None:
        """This loss, a tensor with its graph, is not finite, and its backward call comes now. Find
        its origin; whether a step follows is not known yet. `names`: of the parameters, by their
        ids; `state_of`: what an optimizer keeps of one. Takes up to a second: see
        `first_bad_value`.
        """
        if not isinstance(loss, torch.Tensor) or is_recording():
            return
        if self._searches >= MAX_SEARCHES_PER_STEP or self._all_searches >= MAX_SEARCHES:
            return
        self._searches += 1
        self._all_searches += 1
        origin = first_bad_value(loss, names, state_of)
        if origin is not None:
            self._origin, self.any = origin, True
            self._first = self._first or origin

    def skipped(self, losses: list[Loss], *, by_loop: bool) -> None:
        """No step was made with these losses, each a number or a tensor `[1]`; those of a
        GradScaler it counts itself.
        """
        self._count += by_loop
        found = [] if is_recording() else on_host(losses)
        if isinstance(found, HostCopy):
            self._copies.append(found)
        else:
            self._inspect(found)
        self._poll()
        self._origin = None
        self.any = bool(self._count or self._bad or self._copies)

    def made(self, step: int, columns: list[str], values: list[float]) -> None:
        """A step was made: send what was held back, and add its columns about those before."""
        origin = self._origin
        self._origin = self._first = None
        if origin is not None:
            self._send(origin, step)
        self._poll()
        if self._count:
            columns.append("steps_skipped")
            values.append(float(self._count))
        self._count = self._bad = self._searches = 0
        self._copies.clear()
        self.any = False

    def withheld(self, step: int) -> None:
        """The step is not made, and the loop is left: send where its loss began to be bad."""
        if self._origin is not None:
            self._send(self._origin, step)

    def _poll(self) -> None:
        while self._copies and self._copies[0].ready():
            self._inspect(self._copies.popleft().values().tolist())

    def _inspect(self, losses: list[float]) -> None:
        bad = next((loss for loss in losses if not math.isfinite(loss)), None)
        if bad is None or self._bad >= BAD_IN_A_ROW:
            return
        self._bad += 1
        step, last = self._training.next_step, self._bad == BAD_IN_A_ROW
        origin = self._first if last else self._origin
        # Weights that are bad while nothing is lost are no warning: they are what is lost.
        if origin is not None and (last or origin.collection != "weights"):
            self._send(origin, step)
        column, value = ("loss", bad) if last else ("nonfinite_skipped", float(self._bad))
        row = StepRow(step, unix_us(), (column,), (value,))
        self._training.step_row(row, urgent=True)

    def _send(self, origin: BadValue, step: int) -> None:
        frame = origin.table().frame(self._training.origin, step, every=1, at_us=unix_us())
        self._training.frame(frame, urgent=True)
