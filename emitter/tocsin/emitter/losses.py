"""Losses and local gradients between two optimizer steps, taken where they come by.

What is kept is a number, or on a GPU a detached copy of one number: never a graph.
"""

from __future__ import annotations

import math
import weakref
from typing import Final, TypeAlias

import numpy as np
import torch

from tocsin.emitter.host_copy import HostCopy
from tocsin.schemas.telemetry import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts, Floats

MAX_LOSSES: Final = 100_000
"""Backward calls of one step that are kept; what comes after is left out."""

Loss: TypeAlias = "float | torch.Tensor"


def loss_of(tensors: object, unscaled: torch.Tensor | None) -> Loss | None:
    """The loss of a backward call from these tensors, if it is one number.

    `unscaled` is what a GradScaler has scaled, and stands for it.
    """
    loss = only(tensors) if unscaled is None else unscaled
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_meta:
        return None
    if loss.is_complex() or hasattr(loss, "to_local"):
        return None
    loss = loss.detach()
    if loss.device.type == "cpu":
        return float(loss)
    copied: torch.Tensor = loss.reshape(1).to(torch.float32, copy=True)
    return copied


def on_host(losses: list[Loss]) -> list[float] | HostCopy:
    """The losses as numbers, or on their way from a GPU."""
    tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    if not tensors:
        return [loss for loss in losses if isinstance(loss, float)]
    with torch.no_grad():
        home = tensors[0].device
        return HostCopy(torch.cat([tensor.to(home) for tensor in tensors]))


def only(tensors: object) -> object:
    """The one that a sequence of one holds, else the thing itself."""
    if isinstance(tensors, tuple | list) and len(tensors) == 1:
        return tensors[0]
    return tensors


class LossBuffer:
    """Losses since the last step. Before a training has begun only the newest count."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []

    def add(self, loss: Loss, *, begun: bool) -> None:
        """Keep one."""
        if len(self._losses) < MAX_LOSSES:
            self._losses.append(loss)
        if not begun:
            del self._losses[:-64]

    def take(self) -> list[Loss]:
        """All of them; none is left."""
        losses, self._losses = self._losses, []
        return losses

    def nonfinite(self) -> float | None:
        """The first that is known not to be finite; None if there is none."""
        return next(
            (x for x in self._losses if isinstance(x, float) and not math.isfinite(x)), None
        )


class LocalGradients:
    """Parameters whose gradient on this rank, before ranks are averaged, is not finite."""

    def __init__(self) -> None:
        self._bad: dict[int, tuple[Floats, Counts]] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def is_new(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter was not watched yet; it is from now on.

        Nothing is written on the parameter itself: it would be pickled with it.
        """
        known = self._watched.get(id(parameter))
        if known is not None and known() is parameter:
            return False
        self._watched[id(parameter)] = weakref.ref(parameter)
        return True

    def look(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete on this rank."""
        from tocsin.emitter.summaries import dense, exact_row, norms

        if parameter.grad is None:
            return
        with torch.no_grad():
            gradient = dense(parameter.grad)
            if gradient is None or gradient.numel() == 0:
                return
            norm = norms([gradient])
            if gradient.device.type != "cpu":
                self._norms[id(parameter)] = norm
            elif not math.isfinite(float(norm)):
                values, counts = exact_row(gradient)
                if counts[2] + counts[3]:
                    self._bad[id(parameter)] = (values.astype(np.float32), counts)

    def take(self, names: dict[int, str]) -> list[tuple[str, Floats, Counts]]:
        """The bad ones as rows; none is left.

        On a GPU one copy of the norms waits for this step's backward, and counts are lower bounds.
        """
        found = [(names.get(i, "?"), *row) for i, row in self._bad.items()]
        if self._norms:
            ids = list(self._norms)
            norms = torch.cat([self._norms[i] for i in ids]).cpu().numpy()
            for i, norm in zip(ids, norms, strict=True):
                if not np.isfinite(norm):
                    counts = np.zeros(len(COUNT_COLUMNS), np.uint64)
                    counts[COUNT_COLUMNS.index("nans" if np.isnan(norm) else "infs")] = 1
                    row = np.zeros(len(STATISTIC_COLUMNS), np.float32)
                    found.append((names.get(i, "?"), row, counts))
        self.clear()
        return found

    def clear(self) -> None:
        """Forget them: the step was skipped."""
        self._bad.clear()
        self._norms.clear()
