"""Losses between two optimizer steps, taken where they come by.

What is kept is a number, or on a GPU a detached copy of one number: never a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.model.mesh_names import whole
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording

MAX_LOSSES: Final = 100_000
"""Backward calls of one step that are kept; what comes after is left out."""

MAX_TOGETHER: Final = 64
"""Losses of one backward call that are added up; of more there is no loss."""

_OPERATIONS: Final = 4
"""So many are followed back from a backward call to what a GradScaler has scaled."""

Loss: TypeAlias = "float | torch.Tensor"
"""A number, or a detached tensor `[1]` of float32 on a GPU."""

is_here: Final = attrgetter("is_cpu")
"""Whether a tensor is on the host, where it can be read at once."""


def loss_of(tensors: object, unscaled: object) -> Loss | None:
    """The loss of a backward call from these tensors, if each is one number; None: it is not.

    Of several it is their sum, whose gradient the call computes. A float where it is on the CPU,
    else a detached copy `[1]`, float32, on its device.

    Args:
        tensors: the tensor that backward is called of, of any shape, or a sequence.
        unscaled: what a GradScaler has scaled, which stands for them.
    """
    loss = only(tensors if unscaled is None else unscaled)
    if isinstance(loss, tuple | list):
        return _sum_of(loss)
    if not isinstance(loss, torch.Tensor):
        return None
    if type(loss) is torch.Tensor and is_here(loss) and loss.dtype.is_floating_point:
        return float(loss.item()) if loss.numel() == 1 else None
    loss = whole(loss)  # as under tensor parallelism
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_meta:
        return None
    if loss.is_complex() or is_recording():
        return None
    loss = loss.detach()
    if is_here(loss):
        return float(loss)
    copied: torch.Tensor = loss.reshape(1).to(torch.float32, copy=True)
    return copied


def _sum_of(tensors: Sequence[object]) -> Loss | None:
    if not 0 < len(tensors) <= MAX_TOGETHER:
        return None
    total: Loss = 0.0
    for each in tensors:
        loss = loss_of(each, None) if isinstance(each, torch.Tensor) else None
        if loss is None:
            return None
        if isinstance(total, torch.Tensor) and isinstance(loss, torch.Tensor):
            loss = loss.to(total.device)
        total = total + loss
    return total


class _MixedLosses(HostCopy):
    """Losses on their way from a GPU, beside some that were computed on the CPU."""

    def __init__(self, source: torch.Tensor, floats: list[float]) -> None:
        super().__init__(source)
        self._floats = floats

    def values(self) -> npt.NDArray[np.float64]:
        """All of them, those of the CPU first."""
        return np.concatenate((np.array(self._floats, np.float64), super().values()))


def on_host(losses: list[Loss]) -> list[float] | HostCopy:
    """The losses as numbers, or on their way from a GPU; tensors are each `[1]`."""
    tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    floats = [loss for loss in losses if isinstance(loss, float)]
    if not tensors or is_recording():
        return floats  # a copy would be in the CUDA graph
    with torch.no_grad():
        together = tensors[0]
        if len(tensors) > 1:
            together = torch.cat([tensor.to(together.device) for tensor in tensors])
        return _MixedLosses(together, floats)


def only(tensors: object) -> object:
    """The one that a sequence of one holds, else the thing itself."""
    if isinstance(tensors, tuple | list) and len(tensors) == 1:
        return tensors[0]
    return tensors


def node_number(tensor: object) -> int | None:
    """The number of the node that has put it out, of those of this thread; None: there is none."""
    node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
    return None if node is None else int(node._sequence_nr())


def made_from(tensor: object, number: int | None) -> bool:
    """Whether a tensor is a part or a multiple of what the node of that number has put out, as in
    `(scaler.scale(loss) / 4).backward()`."""
    found = tensor.grad_fn if isinstance(tensor, torch.Tensor) and number is not None else None
    for _ in range(_OPERATIONS):
        if found is None:
            return False
        if found._sequence_nr() == number:
            return True
        inputs = [before for before, _ in found.next_functions if before is not None]
        # With several inputs it is the sum of more than that.
        found = inputs[0] if len(inputs) == 1 else None
    return False


def first(tensors: object) -> object:
    """The first one of a sequence, else the thing itself: its graph stands for that of all."""
    return tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors


def first_bad(tensors: object) -> object:
    """The first one on the CPU that is not finite, if there are several, else the thing itself."""
    if isinstance(tensors, tuple | list):
        for each in tensors:
            loss = loss_of(each, None)
            if isinstance(loss, float) and not math.isfinite(loss):
                return each
    return first(tensors)


class LossBuffer:
    """Losses since the last step, each a number or a tensor `[1]`. Before a training has begun only
    the newest count.
    """

    def __init__(self) -> None:
        self.held: list[Loss] = []
        """Those that were kept."""
        self.skipped = 0
        """Steps that a GradScaler has skipped since the last one that was made."""

    def add(self, loss: Loss, *, begun: bool) -> None:
        """Keep one, a number or a tensor `[1]`."""
        if len(self.held) < MAX_LOSSES:
            self.held.append(loss)
        if not begun:
            del self.held[:-64]

    def drain(self) -> list[Loss]:
        """All of them, each a number or a tensor `[1]`; none is left."""
        losses, self.held = self.held, []
        return losses

    def skip(self) -> None:
        """The step was skipped, and its losses with it; also before a training has begun."""
        self.held = []
        self.skipped += 1

    def clear(self) -> None:
        """Forget all: another training begins."""
        self.held = []
        self.skipped = 0

    def nonfinite(self) -> float | None:
        """The first that is known not to be finite; None if there is none."""
        return next((x for x in self.held if isinstance(x, float) and not math.isfinite(x)), None)
