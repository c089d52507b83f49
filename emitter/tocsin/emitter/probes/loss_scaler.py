"""What a GradScaler does: steps that it skips, and its scale as far as that needs no waiting."""

from __future__ import annotations

from typing import Final

import torch

from tocsin.emitter.probes.losses import LossBuffer
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.training.training import Training
from tocsin.schemas.monotonic_clock import unix_us

COPY_EVERY: Final = 100
"""Updates after which the scale is copied from a GPU; after each skipped step it is, too."""

REPORT_EVERY: Final = 10
"""Skipped steps in a row after which it is reported that no step was made."""


class LossScaler:
    """The `GradScaler` of one training. `active`: there is one."""

    def __init__(self, training: Training, losses: LossBuffer) -> None:
        self.active = False
        self._training = training
        self._losses = losses
        self._scale: float | None = None
        self._copy: HostCopy | None = None
        self._updates = 0

    def updated(self, scaler: object, *, made_step: bool) -> bool:
        """Called after `GradScaler.update`.

        Whether the step was skipped: no optimizer has made one.
        """
        self.active = True
        self._sample(scaler, skipped=not made_step)
        if made_step:
            return False
        self._losses.skipped += 1
        if self._losses.skipped % REPORT_EVERY == 0:
            self._report("scaler_skipped", float(self._losses.skipped))
        return True

    def add_to(self, columns: list[str], values: list[float]) -> None:
        """Add its scalars to those of a step that was made."""
        if not self.active and not self._losses.skipped:
            return
        columns.append("scaler_skipped")
        values.append(float(self._losses.skipped))
        if self._scale is not None:
            columns.append("scaler_scale")
            values.append(self._scale)
        self._losses.skipped = 0

    def usual(self) -> tuple[float, ...] | None:
        """What `add_to` would add to a usual step; None: there is more to send."""
        if self._losses.skipped:
            return None
        if not self.active:
            return ()
        return (0.0,) if self._scale is None else (0.0, self._scale)

    def _sample(self, scaler: object, *, skipped: bool) -> None:
        if self._copy is not None and self._copy.ready():
            self._scale, self._copy = float(self._copy.values()[0]), None
        scale = getattr(scaler, "_scale", None)
        if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
            return
        if scale.device.type == "cpu":
            self._scale = float(scale)
        elif (skipped or self._updates % COPY_EVERY == 0) and not is_recording():
            self._copy = HostCopy(scale.detach().reshape(1))
        self._updates += 1

    def _report(self, column: str, value: float) -> None:
        """A scalar of the step that should have come."""
        row = StepRow(self._training.next_step, unix_us(), (column,), (value,))
        self._training.step_row(row, urgent=True)
